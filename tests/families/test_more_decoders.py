"""Decoders of `tiny_families.py` against transformers: whole, in odd chunks, token by token, and last tokens alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from causal_oracle import oracle
from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import model_info_from_config
from slipstream.nn.registry import find_shape
from tiny import write_tiny
from tiny_families import MORE

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MORE},
    "smollm3 window": ("smollm3", {"use_sliding_window": True, "sliding_window": 7}),
    "ministral3 window": ("ministral3", {"sliding_window": 9}),
    "seed_oss other biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "arcee biased": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "ernie4_5 biased": ("ernie4_5", {"use_bias": True}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cohere normed heads": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "stablelm 12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False}),
    "gpt_neox in a row": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "phi tied": ("phi", {"tie_word_embeddings": True}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
}
STEPS = [{"short": 1, "long": 30}, {"long": 1, "short": 4}, {"short": 1, "long": 25}, *[{"short": 1, "long": 1}] * 2]


def texts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 300, (n,), generator=generator).tolist() for name, n in (("long", 58), ("short", 8))}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_texts_are_cut(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    prompts = texts()
    folder = write_tiny(tmp_path, family, torch.float64, **changes)
    expected = oracle(folder, torch.float64, prompts)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-4)):  # float32 has kernels of its own
        model = load(folder, dtype)
        whole = HandRunner(model, dtype).run(prompts)
        for name in prompts:
            assert expected[name].std() > 0.3
            torch.testing.assert_close(whole[name].double(), expected[name], rtol=0, atol=tolerance)
        cut, last, place = HandRunner(model, dtype, slack=3), HandRunner(model, dtype), dict.fromkeys(prompts, 0)
        for step in STEPS:
            chunks = {name: prompts[name][place[name] : place[name] + size] for name, size in step.items()}
            found, ends = cut.run(chunks), last.run_last(chunks)
            for name, size in step.items():
                wanted = expected[name][place[name] : place[name] + size]
                place[name] += size
                torch.testing.assert_close(found[name].double(), wanted, rtol=0, atol=tolerance)
                torch.testing.assert_close(ends[name].double(), wanted[-1], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "changes", "error", "words"),
    [
        ("phi", {"qk_layernorm": True}, UnsupportedModel, "qk_layernorm"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, UnsupportedModel, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, UnsupportedModel, "scale_attn_weights = False"),
        ("gpt2", {"add_cross_attention": True}, UnsupportedModel, "cross attention"),
        ("smollm3", {"no_rope_layers": [1]}, BadCheckpoint, "1 entries for 2 layers"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 2}, BadCheckpoint, "chunked_attention"),
        ("cohere2", {"sliding_window": 0}, BadCheckpoint, "sliding_window of config.json is 0"),
        ("apertus", {"hidden_act": "swiglu"}, UnsupportedModel, "swiglu"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    family: str, changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, family)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        load(folder)


def test_a_gpt2_config_leaves_out_the_size_of_its_mlp() -> None:
    facts = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    shape = find_shape(model_info_from_config(facts | {"vocab_size": 100, "n_inner": None}))
    assert shape.layers[0].feed.size == 256 and shape.tied and not shape.headless


def test_exaone_patterns_of_the_first_releases() -> None:
    facts = {
        "architectures": ["Exaone4ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 128, "sliding_window": 8,
    }  # fmt: skip
    shape = find_shape(model_info_from_config(facts | {"sliding_window_pattern": "LLLG"}))
    assert [mixer.window for mixer in shape.attentions] == [8, 8, 8, 0, 8, 0]
    assert [mixer.rope for mixer in shape.attentions] == [0, 0, 0, 1, 0, 1]  # the second rotates nothing
