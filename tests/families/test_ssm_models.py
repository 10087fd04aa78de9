"""State space models and hybrids with them against transformers: whole, in odd chunks, token by token; refusals."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from causal_oracle import oracle
from hand_batch import HandRunner
from hand_load import load
from repeats import slow
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import model_info_from_config, read_model_info
from slipstream.nn.layers import recurrent
from slipstream.nn.registry import find_shape
from tiny import write_tiny, write_weights
from tiny_saved import NEMOTRON_3, SAVED

LENGTHS = {"a": 100, "b": 70}
ODD = [{"b": 1, "a": 50}, {"a": 1, "b": 50}, {"b": 1, "a": 29}, {"a": 1, "b": 1}, {"b": 17, "a": 19}]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in SAVED},
    "mamba biased": ("mamba", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    "mamba2 biased": ("mamba2", {"use_bias": True, "use_conv_bias": False}),
    "granite dense with rope": ("granite_moe_hybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "bamba biased": ("bamba", {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}),
    "falcon_h1 norm first": ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True}),
    "falcon_h1 gate first": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h biased": ("nemotron_h", {"use_bias": True, "mlp_bias": True}),
    "nemotron 3": ("nemotron_h", NEMOTRON_3),
    "nemotron 3 latent": ("nemotron_h", {**NEMOTRON_3, "moe_latent_size": 24}),
    "nemotron 3 latent biased": ("nemotron_h", {**NEMOTRON_3, "moe_latent_size": 24, "mlp_bias": True}),
    "jamba dense": ("jamba", {"num_experts": 1}),
    "lfm2 biased": ("lfm2", {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe plain router": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0}),
}


def texts(**lengths: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 300, (n,), generator=generator).tolist() for name, n in lengths.items()}


def in_steps(runner: HandRunner, prompts: dict[str, list[int]], sizes: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    """Logits of the prompts, computed by steps of some tokens of some rows."""
    place, found = dict.fromkeys(prompts, 0), {name: [] for name in prompts}
    for step in sizes:
        chunks = {name: prompts[name][place[name] : place[name] + size] for name, size in step.items()}
        for name, logits in runner.run(chunks).items():
            found[name].append(logits)
            place[name] += step[name]
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_float64(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    prompts = texts(**LENGTHS)
    folder = write_tiny(tmp_path, family, torch.float64, **changes)
    expected = oracle(folder, torch.float64, prompts)
    model = load(folder, torch.float64)
    found = in_steps(HandRunner(model, torch.float64, num_pages=128), prompts, ODD)
    last = HandRunner(model, torch.float64, num_pages=128).run_last(prompts)
    for name in prompts:
        assert expected[name].std() > 0.3
        # the cosines of some positions differ in the last bit of float32: vector and scalar code of torch
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(last[name], expected[name][-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_layer_computes_gates_of_last_tokens_only(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_tiny(tmp_path, "mamba2", dtype), dtype)
    shape = model.layers[-1].shape.mixers[0]
    sizes, real = [], recurrent.linear

    def record(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        sizes.append((len(x), len(weight)))
        return real(x, weight, bias)

    monkeypatch.setattr(recurrent, "linear", record)
    HandRunner(model, dtype, num_pages=128).run_last(texts(**LENGTHS))
    assert sizes == [(sum(LENGTHS.values()), shape.num_channels + shape.num_heads), (len(LENGTHS), shape.size)]


@pytest.mark.parametrize("family", [slow(family) if place % 2 else family for place, family in enumerate(SAVED)])
def test_logits_equal_transformers_in_float32(family: str, tmp_path: Path) -> None:
    prompts = texts(**LENGTHS)
    folder = write_tiny(tmp_path, family, torch.float32)
    expected = oracle(folder, torch.float32, prompts)
    model = load(folder)
    for sizes in ([LENGTHS], ODD):
        found = in_steps(HandRunner(model, num_pages=128), prompts, sizes)
        for name in prompts:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.every_second("family")
@pytest.mark.parametrize("family", SAVED)
def test_steps_of_any_size_agree_in_float64(family: str, tmp_path: Path) -> None:
    prompts = texts(a=80, b=66)
    model = load(write_tiny(tmp_path, family, torch.float64), torch.float64)
    whole, odd, one = (
        in_steps(HandRunner(model, torch.float64, num_pages=128), prompts, sizes)
        for sizes in ([{"a": 80, "b": 66}], [{"b": 1, "a": 40}, {"a": 40, "b": 65}], [{"a": 1, "b": 1}] * 66)
    )
    for name in prompts:
        torch.testing.assert_close(odd[name], whole[name], rtol=0, atol=1e-9)
        torch.testing.assert_close(one[name], whole[name][:66], rtol=0, atol=1e-9)


def test_stacked_experts_without_gates(tmp_path: Path) -> None:
    """As transformers 5 keeps them: a tensor for the ups of all experts and one for their downs."""
    family, changes = VARIANTS["nemotron 3"]
    folder, prompts = write_tiny(tmp_path, family, torch.float64, **changes), texts(a=40)
    expected = HandRunner(load(folder, torch.float64), torch.float64).run(prompts)["a"]
    weights = load_file(folder / "model.safetensors")
    for layer, part in product((1, 3), ("up", "down")):
        root = f"backbone.layers.{layer}.mixer"
        each = [weights.pop(f"{root}.experts.{expert}.{part}_proj.weight") for expert in range(6)]
        weights[f"{root}.experts.{part}_proj"] = torch.stack(each)
    write_weights(folder, weights)
    assert HandRunner(load(folder, torch.float64), torch.float64).run(prompts)["a"].equal(expected)


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_older_name_of_tied_embeddings(family: str, is_tied: bool, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, family) / "config.json"
    settings = json.loads(path.read_text())
    settings.pop("tie_word_embeddings", None)
    assert model_info_from_config(settings | {"tie_embedding": is_tied}).tied_embeddings == is_tied


def test_fields_of_nemotron_h_under_their_older_names(tmp_path: Path) -> None:
    """As NVIDIA's first checkpoints have them."""
    older = {
        "head_dim": "attention_head_dim", "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv",
        "time_step_min": "mamba_dt_min", "use_conv_bias": "mamba_conv_bias",
    }  # fmt: skip
    folder = write_tiny(tmp_path, "nemotron_h", head_dim=24, n_groups=4, conv_kernel=3, use_conv_bias=False)
    expected = find_shape(read_model_info(folder))
    assert expected.attentions[0].head_dim == 24
    config = json.loads((folder / "config.json").read_text())
    config = {older.get(name, name): value for name, value in config.items()} | {"head_dim": None}
    assert set(older.values()) <= set(config)
    assert find_shape(model_info_from_config(config)) == expected


@pytest.mark.parametrize(
    ("family", "changes", "error", "words"),
    [
        ("mamba2", {"num_heads": 4}, BadCheckpoint, "must fit"),
        ("mamba2", {"n_groups": 3}, BadCheckpoint, "3 groups"),
        ("mamba", {"conv_kernel": 1}, UnsupportedModel, "convolution of 1 token"),
        ("mamba", {"hidden_act": "gelu"}, UnsupportedModel, "only silu"),
        ("bamba", {"hidden_act": "gelu"}, UnsupportedModel, "only silu"),
        ("granite_moe_hybrid", {"position_embedding_type": "alibi"}, UnsupportedModel, "alibi"),
        ("granite_moe_hybrid", {"layer_types": ["mamba"]}, BadCheckpoint, "kinds of its 3 layers"),
        ("falcon_h1", {"attention_bias": True}, UnsupportedModel, "attention_in_multiplier"),
        ("falcon_h1", {"mamba_proj_bias": True}, UnsupportedModel, "ssm_in_multiplier"),
        ("nemotron_h", {**NEMOTRON_3, "moe_latent_size": 0}, BadCheckpoint, "no moe_latent_size"),
        ("nemotron_h", {"layers_block_type": ["mamba", "pool"]}, BadCheckpoint, "pool"),
        ("nemotron_h", {"layers_block_type": None, "num_hidden_layers": 3}, BadCheckpoint, "neither layers_block_type"),
        ("nemotron_h", {"layers_block_type": ["mlp", "mlp"]}, UnsupportedModel, "2 layers and none with attention"),
        ("nemotron_h", {**NEMOTRON_3, "layers_block_type": ["moe"]}, UnsupportedModel, "none with attention"),
        ("lfm2", {"layer_types": ["conv"]}, BadCheckpoint, "layer_types"),
        ("mamba2", {"is_causal": False}, UnsupportedModel, "recurrent layers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    family: str, changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    config = json.loads((write_tiny(tmp_path, family) / "config.json").read_text()) | changes
    with pytest.raises(error, match=words):
        find_shape(model_info_from_config(config))
