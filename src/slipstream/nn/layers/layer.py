"""Layer: a module without torch's hooks; and Layout: what all layers of a model are built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.device.collectives import Group
from slipstream.nn.weights.weight_format import FormatOf


class Layer(nn.Module):
    """`nn.Module` checks for hooks at each call, which takes a twentieth of a decode step of a small model."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


@dataclass(frozen=True, slots=True)
class Layout:
    hidden_size: int
    dtype: torch.dtype
    format_of: FormatOf


# RankedLayer: a layer that exchanges data with the same layer of other ranks.


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
