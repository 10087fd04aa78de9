"""Low-bit GEMM in plain torch: the oracle of the kernels, and the offset term that torch's kernel lacks."""

from __future__ import annotations

import torch

from slipstream.ops.dequant import BLOCK
from slipstream.ops.low_bit.planes import Planes


def multiply(x: torch.Tensor, planes: Planes) -> torch.Tensor:
    """x [T, columns] to [T, rows], with dequantized weights."""
    weight = torch.zeros(planes.num_rows, planes.num_columns, dtype=torch.float32)
    groups = weight.view(planes.num_rows, -1, BLOCK)
    for pairs, scale in zip(planes.pairs, planes.scales, strict=True):
        values = torch.stack((pairs & 15, pairs >> 4), -1).view(groups.shape).float() - 8
        groups.add_(values.mul_(scale.unsqueeze(-1)))
    if planes.offset is not None:
        groups.add_(planes.offset.unsqueeze(-1))
    return x @ weight.t()


def add_group_sums(out: torch.Tensor, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Adds the offset term to out [T, rows]: the sum of x over each group of columns, times offset [groups, rows]."""
    return out.addmm_(x.view(x.shape[0], -1, BLOCK).sum(-1), offset)
