"""Layers of other kinds than attention and a feed-forward, against plain torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from hand_batch import HandRunner
from plain_decoder import plain_logits, randomize
from slipstream.checkpoint.model_info import RopeInfo
from slipstream.nn.decoder import Decoder, DecoderShape, RopeShape
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape
from slipstream.nn.weights.weight_format import Unquantized

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
