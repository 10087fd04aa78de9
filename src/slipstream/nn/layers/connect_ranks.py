"""connect_ranks: gives the layers of a model the group over which they exchange data with other ranks."""

from __future__ import annotations

import torch

from slipstream.dist.group import Group
from slipstream.nn.layers.experts import Experts
from slipstream.nn.layers.sharded_linear import RowParallelLinear


def connect_ranks(model: torch.nn.Module, group: Group) -> None:
    for module in model.modules():
        if isinstance(module, RowParallelLinear | Experts):
            module.group = group
