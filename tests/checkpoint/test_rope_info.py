"""Rope as config.json writes it, in all the ways it was written: the frequencies are those of transformers."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import RopeInfo, model_info_from_config
from slipstream.nn.layers.rope import rope_frequencies

SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Llama": ("llama", {}), "Mistral": ("mistral", {}), "Qwen2": ("qwen2", {}), "Qwen3": ("qwen3", {"head_dim": 32}),
    "Olmo2": ("olmo2", {}), "Gemma2": ("gemma2", {"head_dim": 32}), "Phi3": ("phi3", {}),
    "Gemma3Text": ("gemma3_text", {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    "ModernBert": ("modernbert", {"layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 9 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
}
LINEAR, OLD_LINEAR = {"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 2.0}
LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
ORIGINAL = {"original_max_position_embeddings": 64}

FLAT: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_theta": 300.0}},
    {"rope_scaling": LINEAR, "rope_theta": 500.0},
    {"rope_scaling": OLD_LINEAR},
    {"rope_scaling": None, "rope_parameters": LINEAR},
    {"rope_scaling": {}, "rope_parameters": LINEAR},
    {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 500.0},
    {"rope_scaling": LINEAR | {"rope_theta": 900.0}, "rope_parameters": YARN | ORIGINAL, "rope_theta": 500.0},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    *(
        {"rope_scaling": kind | own, **above}
        for kind, own, above in itertools.product(
            (LLAMA3 | {"rope_theta": 800.0}, YARN, YARN | {"attention_factor": 1.7, "beta_fast": 16.0}),
            ({}, ORIGINAL),
            ({}, {"original_max_position_embeddings": 128}),
        )
    ),
    {"rope_parameters": YARN | ORIGINAL, "original_max_position_embeddings": 32},
]
LONG_ROPES: list[dict[str, Any]] = [
    {name: LONG | own, **above}
    for name, own, above in itertools.product(
        ("rope_scaling", "rope_parameters"),
        ({}, ORIGINAL, ORIGINAL | {"factor": 8.0}, {"attention_factor": 1.3}),
        ({}, {"original_max_position_embeddings": 128}),
    )
]
BY_LAYER: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
    {"global_rope_theta": 500.0, "local_rope_theta": 50.0},
    {"rope_parameters": LAYERS},
    {"rope_parameters": {"full_attention": LAYERS["full_attention"]}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}},
    {"rope_parameters": LAYERS, "rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 6.0}},
    {"rope_parameters": LAYERS, "rope_scaling": {"rope_theta": 444.0}},
    {"rope_scaling": LINEAR, "rope_theta": 500.0},
    {"rope_scaling": OLD_LINEAR},
    {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}, **ORIGINAL},
]
CASES = [
    *((family, facts) for family in FAMILIES if family not in ("Phi3", "Gemma3Text", "ModernBert") for facts in FLAT),
    *(("Phi3", facts) for facts in (*FLAT[:5], *LONG_ROPES)),
    ("Phi3", {"rope_scaling": {**LONG, "rope_type": "yarn"}, "original_max_position_embeddings": 128}),
    *(("Llama", facts) for facts in LONG_ROPES),
    *((family, facts) for family in ("Gemma3Text", "ModernBert") for facts in BY_LAYER),
]


def theirs(rope: Any, length: int) -> dict[str, tuple[list[float], float]]:
    """Frequencies and scale of full and of window attention, after a text of this length."""
    by_layer = hasattr(rope, "full_attention_inv_freq")
    found = {}
    for kind in ("full_attention", "sliding_attention") if by_layer else ("",):
        arguments = (kind,) if by_layer else ()
        rope(torch.zeros(1), torch.arange(length)[None], *arguments)
        name = f"{kind}_" if by_layer else ""
        frequencies, scale = getattr(rope, f"{name}inv_freq"), getattr(rope, f"{name}attention_scaling")
        found[kind or "full_attention"] = frequencies.tolist(), scale
    return found


@pytest.mark.parametrize(("family", "facts"), CASES, ids=lambda value: json.dumps(value)[:90])
def test_frequencies_are_those_of_transformers(family: str, facts: dict[str, Any], tmp_path: Path) -> None:
    name, own = FAMILIES[family]
    written = SIZES | own | {"model_type": name, "architectures": [f"{family}Model"]} | facts
    (tmp_path / "config.json").write_text(json.dumps(written))
    info = model_info_from_config(json.loads(json.dumps(written)))
    with torch.device("cpu"):
        unused = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path)).rotary_emb
    for length in (512, 40):
        expected = theirs(copy.deepcopy(unused), length)
        for kind, rope in (("full_attention", info.rope), ("sliding_attention", info.local_rope)):
            if kind not in expected:
                assert rope is None
                continue
            assert isinstance(rope, RopeInfo)
            # a request has the frequencies of its length where that makes a difference
            short = rope.short_length(512)
            num_positions = 512 if short is None or length > short else short
            frequencies, scale = rope_frequencies(rope, 32, 512, num_positions)
            assert frequencies.tolist() == pytest.approx(expected[kind][0], rel=1e-5)
            assert scale == pytest.approx(expected[kind][1], rel=1e-6)


@pytest.mark.parametrize("family", ["Gemma3Text", "ModernBert"])
def test_one_rope_for_layers_that_have_two_is_refused(family: str) -> None:
    """As transformers does: which of the two it is for cannot be known."""
    flat = {"rope_parameters": {"rope_type": "linear", "factor": 5.0}}
    with pytest.raises(BadCheckpoint, match=r"rope_parameters.*full_attention and sliding_attention"):
        model_info_from_config(SIZES | FAMILIES[family][1] | {"architectures": [f"{family}Model"]} | flat)
