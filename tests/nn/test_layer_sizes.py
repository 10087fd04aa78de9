"""The memory that layers of a shape allocate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.checkpoint.model_info import model_info_from_config
from slipstream.nn.registry import find_shape
from slipstream.nn.shapes import AttentionShape, ExpertShape, LayerShape, MlpShape, NormShape, sizes_of
from slipstream.ops.gemm.moe.reference import RouterRule

NORM = NormShape(eps=1e-5)
ATTENTION = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
OF_ATTENTION = 4 * 64 + 5 * 32
LAYER = LayerShape(mixers=(ATTENTION,), feed=MlpShape(size=96, activation="silu"), norm=NORM)


def test_a_dense_model() -> None:
    found = sizes_of((LAYER,) * 3, 64, on_cpu=True)
    assert (found.widest, found.rotary, found.split_sums, found.keys) == (OF_ATTENTION, 48, 64 + 8, 32)
    assert (found.scored_heads, found.relative_heads, found.relative_terms) == (0, 0, 0)
    wide = replace(LAYER, feed=MlpShape(size=500, activation="silu"))
    assert sizes_of((LAYER, wide), 64, on_cpu=True).widest == 1500


def test_every_group_has_sums_and_the_largest_heads_count() -> None:
    larger = replace(ATTENTION, num_heads=2, num_kv_heads=1, head_dim=48, rope=1, soft_cap=3.0)
    windowed = replace(ATTENTION, window=8)
    shared = replace(ATTENTION, kv_source=0)
    layers = tuple(replace(LAYER, mixers=(mixer,)) for mixer in (ATTENTION, larger, windowed, shared))
    found = sizes_of(layers, 64, on_cpu=True)
    assert found.split_sums == (64 + 8) + (96 + 4) + (64 + 8)
    assert (found.keys, found.scored_heads, found.rotary) == (48, 2, 3 * (16 + 48))


def test_mixers_side_by_side_are_there_at_once() -> None:
    both = replace(LAYER, mixers=(ATTENTION, replace(ATTENTION, name="second")))
    assert sizes_of((both,), 64, on_cpu=True).widest == 2 * OF_ATTENTION
    assert sizes_of((replace(LAYER, feed=None),), 64, on_cpu=True).widest == OF_ATTENTION
    assert sizes_of((replace(LAYER, mixers=()),), 64, on_cpu=True).widest == 3 * 96


@pytest.mark.parametrize(("on_cpu", "rows"), [(True, 2 * 6 * 64 + 3 * 40), (False, 2 * (2 * 64 + 40))])
def test_experts_hold_router_scores_and_rows_of_those_that_are_chosen(on_cpu: bool, rows: int) -> None:
    shared = MlpShape(size=30, activation="silu")
    experts = ExpertShape(num_experts=8, size=40, router=RouterRule(2), shared=shared)
    found = sizes_of((LAYER, replace(LAYER, feed=experts)), 64, on_cpu)
    assert found.widest == OF_ATTENTION + 8 * 8 + 3 * 30 + rows


def test_an_encoder_reports_scores_by_distance() -> None:
    sizes = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    for kind, terms in (("absolute", 0), ("relative_key", 1), ("relative_key_query", 2)):
        info = model_info_from_config({"architectures": ["BertModel"], **sizes, "position_embedding_type": kind})
        found = find_shape(info).sizes(on_cpu=True)
        assert (found.relative_terms, found.relative_heads) == (terms, 4 if terms else 0)
        assert found.split_sums == 0
