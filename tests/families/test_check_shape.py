"""Sizes that only one family reads from config.json: impossible ones are named before a kernel gets them."""

from __future__ import annotations

import pytest

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import model_info_from_config
from slipstream.nn.registry import find_shape
from tiny import _COMMON, _FAMILIES
from tiny_saved import SAVED

WRONG = {
    "phi3": [("sliding_window", 2**63, "window"), ("sliding_window", -1, "window")],
    "deepseek_v3": [
        ("kv_lora_rank", 10**9, "head_dim"), ("kv_lora_rank", True, "kv_rank"), ("q_lora_rank", -1, "q_rank"),
        ("n_routed_experts", 10**9, "num_experts"), ("moe_intermediate_size", 2**63, "size"),
        ("routed_scaling_factor", float("inf"), "scale"),
    ],
    "glm4_moe": [("n_shared_experts", -1, "size")],
    "gemma3n": [("altup_num_inputs", 10**9, "num_copies"), ("hidden_size_per_layer_input", True, "size")],
    "jamba": [
        ("mamba_expand", 0, "size"), ("mamba_d_conv", 2**63, "conv_width"), ("mamba_d_state", True, "state_size"),
    ],
}  # fmt: skip


DEBERTA = {
    "architectures": ["DebertaV2Model"], "relative_attention": True, "pos_att_type": "p2c|c2p", "share_att_key": True,
    "position_buckets": 16, "layer_norm_eps": 1e-7, "pad_token_id": 0,
}  # fmt: skip


def test_deberta_has_more_distances_than_near_buckets():
    find_shape(model_info_from_config({**_COMMON, **DEBERTA, "max_relative_positions": 10}))
    with pytest.raises(BadCheckpoint, match="wrong value: the largest distance is 9, no more than half of the 16"):
        find_shape(model_info_from_config({**_COMMON, **DEBERTA, "max_relative_positions": 9}))


@pytest.mark.parametrize("family", list(WRONG))
def test_a_size_that_no_model_has_is_named(family):
    config = {**_COMMON, **(_FAMILIES | SAVED)[family]}
    find_shape(model_info_from_config(config))  # as it is, it passes
    for key, value, name in WRONG[family]:
        with pytest.raises(BadCheckpoint, match=rf"config.json of .* {name} is "):
            find_shape(model_info_from_config(config | {key: value}))


def test_every_family_passes():
    """falcon_h1 and nemotron_h have no largest step size: it is infinite."""
    for family in _FAMILIES | SAVED:
        find_shape(model_info_from_config({**_COMMON, **(_FAMILIES | SAVED)[family]}))
