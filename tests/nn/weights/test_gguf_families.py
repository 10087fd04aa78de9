"""GGUF files of the decoders in `tiny_families.py` give the logits of the safetensors that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from slipstream.checkpoint.gguf_info import FAMILIES
from tiny import write_tiny
from tiny_gguf_encoders import ARCHITECTURES as ENCODERS
from tiny_gguf_families import ARCHITECTURES, write_family_gguf

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16}
CHANGES: dict[str, dict[str, Any]] = {
    # llama.cpp's script knows every fourth layer without rope; the local rope of OLMo-3 has the same base
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},  # without rope_freqs
    "olmo3": {
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        }
    },
}
VARIANTS = {
    **{family: (family, CHANGES.get(family, {})) for family in ARCHITECTURES},
    "cohere normed heads": ("cohere", {"use_qk_norm": True}),
    "stablelm 12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "seed_oss other biases": ("seed_oss", {"attention_out_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_gives_the_same_logits_as_its_folder(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    folder = write_tiny(tmp_path, family, torch.float32, **changes)
    text = {"a": list(range(5, 45))}
    expected = HandRunner(load(folder, torch.float64), torch.float64).run(text)["a"]
    found = HandRunner(load(write_family_gguf(folder), torch.float64), torch.float64).run(text)["a"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)  # the file's parameters are float32


def test_every_architecture_of_gguf_files_is_tested() -> None:
    of_other_tests = {"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "qwen2vl", "qwen3vl"}
    assert {*FAMILIES} == {*ARCHITECTURES.values(), *ENCODERS.values()} | of_other_tests
