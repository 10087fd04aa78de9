"""Fields that a config.json leaves out have the values that transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import check_info, model_info_from_config
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.registry import find_shape
from tiny import _COMMON, _CONFIGS, _FAMILIES
from tiny_families import MORE
from tiny_saved import SAVED

TINY = _FAMILIES | SAVED | MORE
# every size is stated in a real config: without one of these a model is refused
REQUIRED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "layers_block_type", "n_embd", "n_layer", "n_head", "n_positions",
}  # fmt: skip
# of no effect on shapes; end tokens are those of generation_config.json and of the tokenizer too
OTHERS = {
    "model_type", "architectures", "transformers_version", "dtype", "eos_token_id", "bos_token_id", "pad_token_id",
    "num_key_value_heads", "n_inner",  # tested apart
}  # fmt: skip
# settings beside the tiny ones: with them the defaults of other fields fit, or matter
_EXPERTS, _HEADS = {"num_experts": 16}, {"linear_num_value_heads": 32}
WITH: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"use_sliding_window": True, "num_hidden_layers": 4, "max_window_layers": 3},
    "olmoe": _EXPERTS,
    "deepseek_v3": {"n_routed_experts": 64},
    "qwen3_next": _EXPERTS | _HEADS,
    "qwen3_5": _HEADS,
    "qwen3_5_moe": _EXPERTS | _HEADS,
    "gemma3n": {"num_hidden_layers": 20, "num_kv_shared_layers": 5, "intermediate_size": 96},
    "gemma4": {"num_hidden_layers": 14, "num_kv_shared_layers": 2},
    "nemotron_h": {"layers_block_type": ["moe", "mamba", "attention"], "n_routed_experts": 4},
}
WITHOUT: dict[str, tuple[str, ...]] = {
    "gemma3n": ("layer_types", "activation_sparsity_pattern"),
    "gemma4": ("layer_types",),
    "mamba": ("intermediate_size",),
    "mamba2": ("intermediate_size",),
    **dict.fromkeys(("granite_moe_hybrid", "bamba", "falcon_h1"), ("mamba_n_heads", "mamba_d_head", "mamba_d_ssm")),
}


def config_class(family: str) -> Any:
    if family in MORE:
        return transformers.CONFIG_MAPPING[family]
    return getattr(transformers, _CONFIGS.get(family) or f"{family.title().replace('_', '')}Config")


def filled(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config with the defaults of transformers."""
    made = config_class(family)(**config)
    found: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return found | {"architectures": config["architectures"]}


def read(config: dict[str, Any]) -> tuple[DecoderShape, dict[str, Any]]:
    info = check_info(model_info_from_config(config))
    shape = find_shape(info)
    assert isinstance(shape, DecoderShape)
    ropes = [msgspec.structs.replace(rope.info, factors=_known(rope.info.factors)) for rope in shape.ropes]
    shape = replace(shape, ropes=tuple(replace(rope, info=info) for rope, info in zip(shape.ropes, ropes, strict=True)))
    names = ("num_layers", "num_heads", "num_kv_heads", "max_positions", "norm_eps", "tied_embeddings", "num_experts")
    return shape, {name: getattr(info, name) for name in names}


def _known(factors: dict[str, Any]) -> dict[str, Any]:
    """Without what transformers adds and does not change a rope."""
    same = {"max_position_embeddings": factors.get("max_position_embeddings"), "partial_rotary_factor": 1.0}
    return {name: value for name, value in factors.items() if name not in same or value != same[name]}


def left_out(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of fields, and the configs that leave them out; "": no field."""
    base = {**_COMMON, **TINY[family]}
    other = {
        name: value for name, value in (base | WITH.get(family, {})).items() if name not in WITHOUT.get(family, ())
    }
    # heads enough for every default of num_key_value_heads
    many = {"head_dim": base.get("head_dim", 16)} if family in SAVED else {"hidden_size": 2048}
    configs = [base] if base == other else [base, other]
    found = [(name, config) for config in configs for name in ("", *config) if name not in OTHERS | REQUIRED]
    found.append(("num_key_value_heads", base | {"num_attention_heads": 128} | many))
    for name, config in found:
        if kinds := config.get("layers_block_type"):
            config |= {"num_hidden_layers": len(kinds)}
        yield name, {field: value for field, value in config.items() if field != name}


@pytest.mark.parametrize("family", TINY)
def test_what_a_config_leaves_out_has_the_default_of_transformers(family: str) -> None:
    compared = 0
    for name, config in left_out(family):
        try:
            expected = read(filled(family, config))
        except (BadCheckpoint, StrictDataclassClassValidationError):  # the default does not fit tiny settings
            assert name
            continue
        compared += 1
        assert read(config) == expected, f"{family} without {name}"
    assert compared > 2
