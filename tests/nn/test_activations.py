"""Activations against transformers' own, by every name that it has."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2CLS, ACT2FN

from slipstream.base.errors import UnsupportedModel
from slipstream.nn.layers.activations import PLAIN, find_activation, find_gated

WITH_WEIGHTS = {"prelu", "xielu"}  # which no model that runs here has
NAMES = sorted(set(ACT2CLS) - WITH_WEIGHTS)
X = torch.cat([torch.linspace(-12, 12, 97, dtype=torch.float64), torch.tensor([0.0, 1e-3, -30.0, 30.0])]).double()


@pytest.mark.parametrize("name", NAMES)
def test_plain_and_gated_equal_transformers(name: str) -> None:
    expected = ACT2FN[name](X)
    torch.testing.assert_close(find_activation(name)(X.clone()), expected, rtol=1e-9, atol=1e-9)
    up = torch.linspace(2, -3, len(X), dtype=torch.float64)
    both = torch.stack([torch.cat([X, up])] * 2)
    given = both.clone()
    torch.testing.assert_close(find_gated(name)(both), torch.stack([expected * up] * 2), rtol=1e-9, atol=1e-9)
    assert both.equal(given)  # what goes in is used again


def test_an_unknown_name_lists_the_known_ones() -> None:
    assert set(NAMES) <= set(PLAIN)
    for find in (find_activation, find_gated):
        with pytest.raises(
            UnsupportedModel,
            match="the activation prelu is not supported; the supported ones are gelu, .*quick_gelu, relu",
        ):
            find("prelu")
