"""RankedLayer: a layer that exchanges data with the same layer of other ranks."""

from __future__ import annotations

import torch

from slipstream.device.collectives import Group
from slipstream.nn.layers.layer import Layer


class RankedLayer(Layer):
    group: Group | None = None  # of the ranks that share the model; set by `connect_ranks` before the first forward

    @property
    def ranks(self) -> Group:
        assert self.group is not None, "the ranks are not connected"
        return self.group


def connect_ranks(model: torch.nn.Module, group: Group) -> None:
    """Gives the layers of a model the group over which they exchange data."""
    for module in model.modules():
        if isinstance(module, RankedLayer):
            module.group = group
