"""Weights of a bfloat16 checkpoint that stay so in a float32 model."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import BadCheckpoint
from slipstream.nn import load as load_module
from slipstream.nn.decoder import Decoder
from slipstream.nn.weights import kinds
from slipstream.nn.weights.kinds import Bfloat16Weight
from slipstream.nn.weights.source import SourceTensor
from slipstream.nn.weights.weight_format import Weight
from slipstream.ops.gemm.table import native_rows
from slipstream.ops.platform import native
from tiny import write_tiny
from tiny_gguf import write_gguf

PROMPTS = {"a": [5, 9, 33, 2, 71], "b": list(range(3, 73)), "c": [8]}


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine measured."""
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    monkeypatch.setattr(kinds, "bfloat16_is_faster", lambda: True)
    monkeypatch.setattr(load_module, "bfloat16_is_faster", lambda: True)


def outputs(model: Decoder) -> list[torch.Tensor]:
    runner = HandRunner(model)
    steps = [runner.run(PROMPTS), runner.run({name: [7] for name in PROMPTS})]
    return [step[name] for step in steps for name in PROMPTS]


def matrix_dtypes(model: Decoder) -> set[torch.dtype]:
    """Of the rows that the C kernels read."""
    weights = [module for module in model.modules() if isinstance(module, Weight)]
    return {run.data.dtype for weight in weights for run in native_rows(weight.matrix) or []}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_outputs_are_those_of_float32_weights(family: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family, torch.bfloat16)
    kept, wide = load(folder, keeps_bfloat16=True), load(folder)
    assert matrix_dtypes(kept) == {torch.bfloat16} and matrix_dtypes(wide) == {torch.float32}
    for mine, theirs in zip(outputs(kept), outputs(wide), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_gguf_file_keeps_its_bfloat16_weights(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", torch.bfloat16)
    file = write_gguf(folder, gguf.GGMLQuantizationType.BF16)
    model = load(file, dequantize=False)
    assert matrix_dtypes(model) == {torch.bfloat16}
    for mine, theirs in zip(outputs(model), outputs(load(file)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_one_matrix_of_another_dtype_makes_all_float32(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", torch.bfloat16)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].float()
    save_file(tensors, file)
    assert matrix_dtypes(load(folder, keeps_bfloat16=True)) == {torch.float32}


def test_slower_bfloat16_weights_become_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "bfloat16_is_faster", lambda: False)
    assert matrix_dtypes(load(write_tiny(tmp_path, "llama", torch.bfloat16), keeps_bfloat16=True)) == {torch.float32}


def test_new_weights_are_not_rounded() -> None:
    weight = Bfloat16Weight(2, 3)
    ((_, target),) = weight.targets(0, 2)
    target.fill(SourceTensor("w", (2, 3), "torch.bfloat16", lambda: torch.ones(2, 3, dtype=torch.bfloat16)))
    assert weight.data.eq(1).all()
    with pytest.raises(BadCheckpoint, match=r'stored as bfloat16.*torch.float32.*dtype="float32"'):
        target.fill(SourceTensor("w", (2, 3), "torch.float32", lambda: torch.ones(2, 3)))
