"""WeightRows: neighbouring rows of a weight, as our C kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class WeightRows(NamedTuple):
    numbers: torch.Tensor  # [rows, columns] float32, or interleaved blocks (ops/low_bit/interleaved.py)
    num_rows: int
    bits: int = 32  # 4 or 8: low-bit
    scales: torch.Tensor | None = None  # of low-bit ones
    offsets: torch.Tensor | None = None  # of 4 bits


def dense_rows(weight: torch.Tensor) -> WeightRows | None:
    """None if the kernels do not take it."""
    if weight.dtype is not torch.float32 or not weight.is_cpu or not weight.is_contiguous():
        return None
    return WeightRows(weight, len(weight))
