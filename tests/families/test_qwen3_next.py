"""Qwen3-Next and Qwen3.5: long texts against transformers and against themselves, layouts of checkpoints, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from causal_oracle import oracle
from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import model_info_from_config, read_model_info
from slipstream.nn.layers import recurrent
from slipstream.nn.registry import find_shape
from slipstream.nn.shapes import AttentionShape, DeltaShape
from tiny import write_tiny, write_weights

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


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


LENGTHS = {"a": 160, "b": 96}
ODD = [{"b": 1, "a": 50}, {"a": 1, "b": 70}, {"b": 1, "a": 77}, {"a": 1, "b": 1}, {"b": 22, "a": 31}, {"b": 1}]
ONE = [{"a": 1, "b": 1}] * 96 + [{"a": 1}] * 64


@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_equal_transformers_whole_in_odd_chunks_and_token_by_token(family: str, tmp_path: Path) -> None:
    prompts = texts(**LENGTHS)
    folder = write_tiny(tmp_path, family, torch.float64)
    expected = oracle(folder, torch.float64, prompts)
    whole, *others = (
        in_steps(HandRunner(load(folder, torch.float64), torch.float64, num_pages=128), prompts, sizes)
        for sizes in ([LENGTHS], ODD, ONE)
    )
    for name in prompts:
        # the cosines of some positions differ in the last bit of float32: vector and scalar code of torch
        torch.testing.assert_close(whole[name], expected[name], rtol=0, atol=1e-6)
        for found in others:
            torch.testing.assert_close(found[name], whole[name], rtol=0, atol=1e-9)
    folder = write_tiny(tmp_path, family, torch.float32)
    expected = oracle(folder, torch.float32, prompts)
    found = in_steps(HandRunner(load(folder), num_pages=128), prompts, ODD)
    for name in prompts:
        assert expected[name].std() > 0.5
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=3e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_projections_on_two_streams_are_those_of_one_product(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_tiny(tmp_path, family, torch.float64), torch.float64)
    prompts = texts(a=64, b=7)
    expected = HandRunner(model, torch.float64).run(prompts)
    sizes: list[int] = []

    def two(x: torch.Tensor) -> bool:
        sizes.append(len(x))
        return True

    monkeypatch.setattr(recurrent, "takes_two_streams", two)
    found = HandRunner(model, torch.float64).run(prompts)
    assert sizes == [71, 71]
    for name in prompts:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


def multimodal(folder: Path, family: str) -> Path:
    """The checkpoint as the text part of a model that also sees pictures, with weights for drafts beside it."""
    weights = load_file(folder / "model.safetensors")
    facts = json.loads((folder / "config.json").read_text())
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
    config = getattr(transformers, f"{name}Config")(text_config=facts, vision_config=vision)
    config.architectures = [f"{name}ForConditionalGeneration"]
    config.save_pretrained(folder)
    inner = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in weights.items()}
    inner |= {"model.visual.blocks.0.norm1.weight": torch.ones(16), "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}
    write_weights(folder, inner)
    return folder


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_inside_a_multimodal_one_is_the_same(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = texts(a=70)
    folder = write_tiny(tmp_path, family, torch.float64)
    expected = HandRunner(load(folder, torch.float64), torch.float64).run(prompts)["a"]
    if family == "qwen3_5_moe":
        stack_experts(folder)
    folder = multimodal(folder, family)
    assert read_model_info(folder).architecture.endswith("ForConditionalGeneration")
    found = HandRunner(load(folder, torch.float64), torch.float64).run(prompts)["a"]
    assert torch.equal(found, expected)
    assert not caplog.records, "weights of pictures and drafts are left out knowingly"


def stack_experts(folder: Path) -> None:
    """As transformers 5 and the hub's Qwen3.5 store them."""
    weights = load_file(folder / "model.safetensors")
    for layer in range(3):
        root = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([weights.pop(f"{root}.{e}.{part}_proj.weight") for e in range(6)])
            for part in ("gate", "up", "down")
        }
        weights[f"{root}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        weights[f"{root}.down_proj"] = parts["down"]
    write_weights(folder, weights)


def facts(folder: Path, **changes: Any) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text()) | changes
    return {name: value for name, value in config.items() if value is not None}


def test_a_config_may_leave_out_what_the_family_has(tmp_path: Path) -> None:
    config = facts(write_tiny(tmp_path, "qwen3_next", num_hidden_layers=8, layer_types=None))
    for name in ("layer_types", "partial_rotary_factor", "linear_conv_kernel_dim", "norm_topk_prob"):
        config.pop(name, None)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    info = model_info_from_config(config)
    shape = find_shape(info)
    kinds = [type(layer.mixers[0]) for layer in shape.layers]
    assert kinds == [DeltaShape, DeltaShape, DeltaShape, AttentionShape] * 2
    assert info.rope.factors["partial_rotary_factor"] == 0.25
    assert shape.layers[0].mixers[0].conv_width == 4
    assert shape.layers[0].feed.router.renormalize
    assert [site for sites in shape.sites for site in sites] == [None, None, None, 0, None, None, None, 1]
    assert [site for sites in shape.state_sites for site in sites] == [0, 1, 2, None, 3, 4, 5, None]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"linear_num_value_heads": 3}, BadCheckpoint, "3 value heads for 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, UnsupportedModel, "convolution of 1 token"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "only silu"),
        ({"layer_types": ["linear_attention"] * 2}, BadCheckpoint, "layer_types"),
        ({"layer_types": ["linear_attention", "mamba", "full_attention"]}, BadCheckpoint, "layer_types"),
        ({"is_causal": False}, UnsupportedModel, "recurrent layers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    config = facts(write_tiny(tmp_path, "qwen3_5"), **changes)
    with pytest.raises(error, match=words):
        find_shape(model_info_from_config(config))


def test_a_missing_projection_is_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen3_next")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.linear_attn.in_proj_ba.weight"]
    write_weights(folder, weights)
    with pytest.raises(BadCheckpoint, match=r"1 missing \(layers.2.delta_net.input.ba.weight\)"):
        load(folder)
