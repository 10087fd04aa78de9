"""Layers of other kinds than attention and a feed-forward, against plain torch."""

from __future__ import annotations

import random
from dataclasses import fields, make_dataclass, replace
from typing import Any

import msgspec
import pytest
import torch

from hand_batch import HandRunner
from hand_cache import make_spec
from plain_decoder import plain_logits, randomize
from slipstream.checkpoint.model_info import RopeInfo
from slipstream.contracts.cache_spec import CacheGroup
from slipstream.nn.block import MIXERS
from slipstream.nn.chains import CudaChain, FusedCpu
from slipstream.nn.decoder import Decoder, DecoderShape, RopeShape
from slipstream.nn.drafters.dflash import BlockAttention
from slipstream.nn.layers.layer import Layout
from slipstream.nn.paged_attention import TritonAttention
from slipstream.nn.sdpa import SdpaAttention, reads_pages
from slipstream.nn.shapes import (
    AttentionShape,
    DeltaShape,
    ExpertShape,
    LatentShape,
    LayerShape,
    MixerShape,
    MlpShape,
    NormShape,
    has_only,
)
from slipstream.nn.ssm_shapes import Mamba1Shape, Mamba2Shape, ShortConvShape
from slipstream.nn.weights.weight_format import Unquantized
from slipstream.ops.gemm.moe.reference import RouterRule

NORM = NormShape(eps=1e-5)
ATTENTION = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
MLP = MlpShape(size=48, activation="silu")
WHOLE = LayerShape(mixers=(ATTENTION,), feed=MLP, norm=NORM)
ONLY_MIXER = replace(WHOLE, feed=None)
ONLY_FEED = replace(WHOLE, mixers=())
SECOND = replace(ATTENTION, name="second", num_heads=2, num_kv_heads=1, window=5)
SIDE_BY_SIDE = replace(WHOLE, mixers=(ATTENTION, SECOND))
LAYERS = {
    "whole": (WHOLE, WHOLE),
    "one sublayer a layer": (ONLY_MIXER, ONLY_FEED, ONLY_MIXER, ONLY_FEED),
    "a mixer at the end": (ONLY_FEED, ONLY_MIXER),
    "two mixers side by side": (SIDE_BY_SIDE, WHOLE, SIDE_BY_SIDE),
    "no gate": (replace(WHOLE, feed=replace(MLP, gated=False)),) * 2,
    "norms after": (replace(SIDE_BY_SIDE, norm_after=True), replace(ONLY_FEED, norm_before=False, norm_after=True)),
}


def make(layers: tuple[LayerShape, ...]) -> Decoder:
    shape = DecoderShape(
        vocab_size=96, hidden_size=32, layers=layers, ropes=(RopeShape(RopeInfo(), 16),), norm=NORM,
        max_positions=128, tied=True,
    )  # fmt: skip
    model = Decoder(shape, 128, torch.float64, lambda name: Unquantized(torch.float64))
    model.materialize(torch.device("cpu"))
    return randomize(model)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_every_kind_equal_plain_torch_however_texts_are_cut(kind: str) -> None:
    model = make(LAYERS[kind])
    rng = random.Random(0)
    texts = {name: [rng.randrange(96) for _ in range(length)] for name, length in (("a", 23), ("b", 9), ("c", 1))}
    expected = {name: plain_logits(model, ids) for name, ids in texts.items()}
    whole = HandRunner(model, torch.float64).run(dict(sorted(texts.items(), reverse=True)))
    for name, logits in whole.items():
        torch.testing.assert_close(logits, expected[name], rtol=0, atol=1e-9)
    runner = HandRunner(model, torch.float64)
    place = dict.fromkeys(texts, 0)
    for step in ({"a": 7}, {"a": 1, "b": 8}, {"c": 1, "b": 1, "a": 14}, {"a": 1}):
        chunks = {name: texts[name][place[name] : place[name] + size] for name, size in step.items()}
        for name, logits in runner.run_last(chunks).items():
            place[name] += step[name]
            torch.testing.assert_close(logits, expected[name][place[name] - 1], rtol=0, atol=1e-9)


def test_a_layer_without_any_part_is_refused() -> None:
    with pytest.raises(AssertionError, match="a mixer or a feed"):
        LayerShape(mixers=(), feed=None, norm=NORM)


def test_two_mixers_are_left_to_the_reference() -> None:
    first, second = make((WHOLE, SIDE_BY_SIDE)).layers
    assert len(first.chain_parts()) == 2 and second.chain_parts() is None


# A fast path runs a shape only if it implements every field. A new field is one that no code implements yet.


def with_new_field(shape: Any, value: float = 0.5) -> Any:
    kind = make_dataclass("Newer", [("new", float, 0.0)], bases=(type(shape),), frozen=True, slots=True, kw_only=True)
    return kind(**{own.name: getattr(shape, own.name) for own in fields(shape)}, new=value)


def fast_paths(layer: LayerShape, norm: NormShape = NORM) -> tuple[bool, bool, bool]:
    """Whether a chain, a C call, and the kernel of a single token take these layers."""
    model = make((layer, layer))
    blocks: list[Any] = list(model.layers)
    model.norm.eps = norm.eps
    fused, chain = FusedCpu.of(blocks, model.norm), CudaChain.of(blocks, model.norm)
    return chain is not None, fused is not None, getattr(blocks[0].attention, "may_be_single", False)


@pytest.fixture
def any_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer's subclass has its layer."""

    class Nearest(dict):
        def __missing__(self, kind: type[MixerShape]) -> Any:
            return self[kind.__base__]

    monkeypatch.setattr("slipstream.nn.block.MIXERS", Nearest(MIXERS))


@pytest.mark.parametrize(
    ("value", "expected"),
    [pytest.param(0.0, (True, True, True), id="at its default"), pytest.param(0.5, (False, False, False), id="used")],
)
def test_a_new_field_of_attention_is_left_to_the_reference(
    value: float, expected: tuple[bool, bool, bool], any_mixer: None
) -> None:
    assert fast_paths(replace(WHOLE, mixers=(with_new_field(ATTENTION, value),))) == expected


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(replace(WHOLE, feed=with_new_field(MLP)), id="feed-forward"),
        pytest.param(replace(WHOLE, feed=with_new_field(replace(MLP, gated=False))), id="feed-forward without a gate"),
        pytest.param(with_new_field(WHOLE), id="layer"),
    ],
)
def test_a_new_field_of_a_feed_or_a_layer_is_left_to_the_reference(layer: LayerShape) -> None:
    assert fast_paths(layer)[:2] == (False, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True, True, True)),
        ({"window": 5, "soft_cap": 2.0}, (True, True, False)),
        ({"qk_norm": "heads", "fused": True, "qkv_bias": True}, (True, True, True)),
        ({"qk_norm": "whole"}, (True, False, False)),
        ({"qk_norm": "each"}, (True, False, False)),
        ({"gated": True}, (True, False, True)),
        ({"value_norm": True, "key_is_value": True}, (True, False, True)),
        ({"norm_after_rope": True, "qk_norm": "heads"}, (True, False, False)),
        ({"sinks": True}, (True, False, False)),
    ],
)
def test_each_fast_path_takes_the_attention_that_it_implements(
    changes: dict[str, Any], expected: tuple[bool, bool, bool]
) -> None:
    assert fast_paths(replace(WHOLE, mixers=(replace(ATTENTION, **changes),))) == expected


def test_one_call_of_all_layers_has_one_eps() -> None:
    assert fast_paths(WHOLE)[1] and not fast_paths(WHOLE, NormShape(eps=0.5))[1]


RECURRENT = [
    DeltaShape(num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=8, conv_width=4),
    Mamba1Shape(size=64, state_size=4, dt_rank=4, conv_width=4),
    Mamba2Shape(num_heads=2, head_dim=16, num_groups=1, state_size=4, conv_width=4),
    ShortConvShape(size=32, conv_width=3),
]
LATENT_SIZES = LatentShape(kv_rank=16, q_rank=0, nope_dim=8, rope_dim=8, value_dim=8, interleaved=False)
LATENT = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=24, scale=0.25, latent=LATENT_SIZES)
EXPERTS = ExpertShape(num_experts=4, size=16, router=RouterRule(top_k=2))


@pytest.mark.parametrize(
    "layer",
    [
        *(pytest.param(replace(WHOLE, mixers=(shape,)), id=type(shape).__name__) for shape in (*RECURRENT, LATENT)),
        pytest.param(replace(WHOLE, feed=EXPERTS), id="experts"),
    ],
)
def test_kernels_without_a_slower_twin_refuse_a_new_field(layer: LayerShape, any_mixer: None) -> None:
    """Of a mixer, of experts and their router; and of norms, which all layers have."""
    make((layer,))
    feed = layer.feed
    if isinstance(feed, ExpertShape):
        changes = [{"feed": with_new_field(feed)}, {"feed": replace(feed, router=with_new_field(feed.router))}]
    else:
        changes = [{"mixers": (with_new_field(layer.mixers[0]),)}]
    for change in (*changes, {"norm": with_new_field(NORM)}):
        with pytest.raises(AssertionError, match="not implement all of"):
            make((replace(layer, **change),))


def test_attention_of_block_drafters_refuses_a_new_field() -> None:
    shape = replace(ATTENTION, qk_norm="heads", causal=False)
    layout = Layout(32, torch.float64, lambda name: Unquantized(torch.float64))
    BlockAttention("attention", shape, NORM, 0, layout)
    with pytest.raises(AssertionError, match="not implement all of"):
        BlockAttention("attention", with_new_field(shape), NORM, 0, layout)


@pytest.mark.parametrize("window", [0, 5])
def test_attention_over_pages_refuses_a_new_field_of_a_cache(window: int) -> None:
    spec = make_spec(window=window)
    known = CacheGroup(spec, (0,))
    assert SdpaAttention([known], torch.float32).in_place and not reads_pages(known)
    kind = msgspec.defstruct("Newer", [("new", float, 0.0)], bases=(type(spec),), frozen=True, kw_only=True)
    group = CacheGroup(kind(**msgspec.structs.asdict(spec), new=0.5), (0,))
    assert not SdpaAttention([group], torch.float32).in_place and reads_pages(group)
    with pytest.raises(AssertionError, match="no kernel implements all of"):
        TritonAttention([group], torch.float32)


@pytest.mark.parametrize(
    ("changes", "is_plain", "may_be_single"),
    [
        ({}, True, True),
        ({"window": 5}, True, False),
        ({"sinks": True}, True, False),
        ({"soft_cap": 2.0}, False, False),
        ({"value_dim": 8}, False, False),
    ],
)
def test_kernels_of_a_gpu_are_chosen_by_what_they_implement(
    changes: dict[str, Any], is_plain: bool, may_be_single: bool
) -> None:
    backend = TritonAttention([CacheGroup(make_spec(**changes), (0,))], torch.float32)
    assert (backend.plain, backend.may_be_single) == ([is_plain], [may_be_single])


def test_a_field_without_a_default_has_to_be_known() -> None:
    assert has_only(NORM, {"eps"}) and not has_only(NORM, {"offset"})
