"""Models that are without their like layers for a while."""

from types import SimpleNamespace

import pytest
from torch import nn

from slipstream.nn.models.shortened import shortened


class Block(nn.Module):
    def __init__(self, window: int = 0, reach: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.attention = SimpleNamespace(reach=reach)


@pytest.mark.parametrize(
    ("windows", "left"),
    [([0] * 28, [0, 1, 27]), ([8, 0, 8, 0, 8, 0], [0, 1, 2, 5]), ([8, 8, 0], [0, 1, 2]), ([0, 0], [0, 1]), ([0], [0])],
)
def test_the_first_the_last_and_one_of_each_kind_between_are_left(windows, left):
    blocks = nn.ModuleList(Block(window) for window in windows)
    model = SimpleNamespace(layers=blocks)
    with shortened(model):
        assert list(model.layers) == [blocks[place] for place in left]
    assert model.layers is blocks


def test_layers_of_an_encoder_differ_by_how_far_they_see():
    blocks = nn.ModuleList(Block(reach=reach) for reach in (0, 64, 64, 0, 64, 64))
    model = SimpleNamespace(layers=blocks)
    with pytest.raises(RuntimeError), shortened(model):
        assert list(model.layers) == [blocks[place] for place in (0, 1, 3, 5)]
        raise RuntimeError
    assert model.layers is blocks
