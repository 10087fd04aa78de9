"""WeightRows: adjacent rows of a weight in the form that the C kernels read."""

from __future__ import annotations

from typing import NamedTuple

import torch


class WeightRows(NamedTuple):
    data: torch.Tensor  # [rows, columns] float32, or interleaved blocks (ops/low_bit/interleaved.py)
    num_rows: int
    bits: int = 32  # 4 or 8: low-bit
    scales: torch.Tensor | None = None  # low-bit only
    offsets: torch.Tensor | None = None  # 4-bit only


def dense_rows(weight: torch.Tensor) -> WeightRows | None:
    """None if the C kernels cannot read this weight."""
    if weight.dtype is not torch.float32 or not weight.is_cpu or not weight.is_contiguous():
        return None
    return WeightRows(weight, len(weight))
