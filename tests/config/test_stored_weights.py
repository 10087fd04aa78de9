"""What files say about weights: format, bytes, parameters and quantisation."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import msgspec
import pytest
import torch

from slipstream.checkpoint.locate import WHOLE
from slipstream.config.options import Options
from slipstream.engine.build import open_model
from slipstream.engine.model_description import ModelDescription, StoredWeights
from tiny import tiny_weights, write_tiny
from tiny_gguf import K_SIZES, write_gguf

KINDS = gguf.GGMLQuantizationType


def stored(path: Path, **options: object) -> StoredWeights:
    return open_model(Options(model=str(path), device="cpu", **options)).description.weights


def num_params(folder: Path) -> int:
    return sum(tensor.numel() for tensor in tiny_weights(folder).values())


@pytest.mark.parametrize(
    ("kind", "file_type", "name"), [(KINDS.Q4_1, 3, "Q4_1"), (KINDS.Q4_K, 15, "Q4_K_M"), (KINDS.Q8_0, None, "Q8_0")]
)
def test_a_gguf_file_has_the_level_of_most_of_its_weights(tmp_path, kind, file_type, name):
    fields = {"general.file_type": file_type} if file_type is not None else {}
    path = write_gguf(write_tiny(tmp_path, **K_SIZES), kind, fields=fields)
    assert stored(path) == StoredWeights("gguf", path.stat().st_size, num_params(tmp_path), name)


def test_parts_of_a_gguf_file_count_together(tmp_path):
    write_gguf(write_tiny(tmp_path), KINDS.Q8_0, part_tensors=10)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 1
    found = stored(parts[0])
    assert (found.num_bytes, found.num_params) == (sum(part.stat().st_size for part in parts), num_params(tmp_path))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_has_the_dtype_of_its_weights(tmp_path, shards):
    write_tiny(tmp_path, dtype=torch.bfloat16, shards=shards, torch_dtype="bfloat16")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert stored(tmp_path) == StoredWeights("safetensors", size, num_params(tmp_path), "BF16")


def test_files_that_are_missing_or_broken_are_no_error_here(tmp_path):
    write_tiny(tmp_path)
    (tmp_path / WHOLE).write_bytes(b"\xff" * 100)
    assert stored(tmp_path, load_format="dummy").num_params == 0
    (tmp_path / WHOLE).write_bytes((2**63).to_bytes(8, "little") + json.dumps({"a": {"shape": "x"}}).encode())
    assert stored(tmp_path, load_format="dummy").num_params == 0
    (tmp_path / WHOLE).unlink()
    assert stored(tmp_path, load_format="dummy") == StoredWeights()


def test_files_are_in_the_memory_of_a_gpu_but_for_what_is_offloaded(tmp_path):
    description = open_model(Options(model=str(write_tiny(tmp_path)), device="cpu")).description
    config = open_model(Options(model=str(tmp_path), device="cpu")).config
    device = msgspec.structs.replace(config.device, kind="cuda")
    offloaded = msgspec.structs.replace(config.model, offload_bytes=1000)
    on_gpu = msgspec.structs.replace(config, device=device)
    sizes = [
        ModelDescription.of(Options(), each, description.defaults, 0).gpu_bytes
        for each in (config, on_gpu, msgspec.structs.replace(on_gpu, model=offloaded))
    ]
    assert sizes == [0, description.weights.num_bytes, description.weights.num_bytes - 1000]
