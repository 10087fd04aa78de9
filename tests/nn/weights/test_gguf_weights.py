"""GGUF files written by the gguf library give the same model as the safetensors they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import BadCheckpoint
from slipstream.nn.weights.gguf import halves_from_pairs
from tiny import LONG_ROPE, write_tiny
from tiny_gguf import pairs_from_halves, write_gguf

PROMPT = {"a": [3, 1, 4, 1, 5, 9, 2, 6]}


def test_rows_in_pairs_are_put_back() -> None:
    rows = torch.randn(24, 5)
    assert halves_from_pairs(pairs_from_halves(rows, 3), 3).equal(rows)
    bias = torch.randn(24)
    assert halves_from_pairs(pairs_from_halves(bias, 3), 3).equal(bias)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_float32_file_gives_the_same_weights(family: str, tied: bool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family, tie_word_embeddings=tied, attention_bias=family == "llama")
    expected = load(folder).state_dict()
    found = load(write_gguf(folder, gguf.GGMLQuantizationType.F32)).state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].equal(expected[name]), name


# scores scaled by the head's size, as a GGUF has it
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi4 mini": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}),
    "olmo2": ("olmo2", {}),
}


@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_gives_the_same_logits(variant: str, tmp_path: Path) -> None:
    family, overrides = FAMILIES[variant]
    folder = write_tiny(tmp_path, family, torch.float64, **overrides)
    text = {"a": list(range(5, 45))}
    expected = HandRunner(load(folder, torch.float64), torch.float64).run(text)["a"]
    path = write_gguf(folder, gguf.GGMLQuantizationType.F32)
    found = HandRunner(load(path, torch.float64), torch.float64).run(text)["a"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)  # the file's numbers are float32


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_packed_weights_stay_near(kind: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    expected = HandRunner(load(folder)).run(PROMPT)["a"]
    found = HandRunner(load(write_gguf(folder, gguf.GGMLQuantizationType[kind]))).run(PROMPT)["a"]
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-6 < error < {"F16": 0.005, "BF16": 0.03, "Q8_0": 0.05, "Q4_1": 0.5}[kind]


def test_unknown_tensors_are_named_as_the_file_has_them(tmp_path: Path) -> None:
    path = write_gguf(write_tiny(tmp_path), gguf.GGMLQuantizationType.F32, {"blk.0.odd": np.zeros(3, np.float32)})
    with pytest.raises(BadCheckpoint, match=r"1 unexpected \(blk.0.odd\)"):
        load(path)
