"""Models that are without their like layers for a while."""

import pytest
from torch import nn

from slipstream.nn.load import shortened
from slipstream.nn.shapes import AttentionShape, LayerShape, NormShape


class Block(nn.Module):
    def __init__(self, window: int = 0, causal: bool = True) -> None:
        super().__init__()
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25}
        attention = AttentionShape(**sizes, window=window, causal=causal)
        self.shape = LayerShape(mixers=(attention,), feed=None, norm=NormShape(eps=1e-6))


class Model:
    def __init__(self, blocks: nn.ModuleList) -> None:
        self.layers = blocks

    def use_layers(self, layers: nn.ModuleList) -> None:
        self.layers = layers


@pytest.mark.parametrize(
    ("windows", "left"),
    [([0] * 28, [0, 1, 27]), ([8, 0, 8, 0, 8, 0], [0, 1, 2, 5]), ([8, 8, 0], [0, 1, 2]), ([0, 0], [0, 1]), ([0], [0])],
)
def test_the_first_the_last_and_one_of_each_kind_between_are_left(windows, left):
    blocks = nn.ModuleList(Block(window) for window in windows)
    model = Model(blocks)
    with shortened(model):
        assert list(model.layers) == [blocks[place] for place in left]
    assert model.layers is blocks


def test_layers_of_an_encoder_differ_by_how_far_they_see():
    blocks = nn.ModuleList(Block(reach, causal=False) for reach in (0, 64, 64, 0, 64, 64))
    model = Model(blocks)
    with pytest.raises(RuntimeError), shortened(model):
        assert list(model.layers) == [blocks[place] for place in (0, 1, 3, 5)]
        raise RuntimeError
    assert model.layers is blocks
