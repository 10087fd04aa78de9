"""WeightRows: adjacent rows of a weight in the form that the C kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch


class RowLayout(IntEnum):
    """Storage formats of rows; mirrors the enum of native_low_bit_layout.h."""

    FLOAT32 = 0
    FOUR_BITS = 1
    EIGHT_BITS = 2
    Q4_K = 3
    Q5_K = 4
    Q6_K = 5
    BFLOAT16 = 6
    Q4_0 = 7


class WeightRows(NamedTuple):
    data: torch.Tensor  # [rows, columns] float32 or bfloat16, or interleaved blocks (ops/low_bit/interleaved.py)
    num_rows: int
    layout: RowLayout = RowLayout.FLOAT32
    scales: torch.Tensor | None = None  # low-bit only
    offsets: torch.Tensor | None = None  # FOUR_BITS only

    @property
    def is_low_bit(self) -> bool:
        return self.layout not in (RowLayout.FLOAT32, RowLayout.BFLOAT16)


def dense_rows(weight: torch.Tensor) -> WeightRows | None:
    """None if the C kernels cannot read this weight."""
    layout = LAYOUTS.get(weight.dtype)
    if layout is None or not weight.is_cpu or not weight.is_contiguous():
        return None
    return WeightRows(weight, len(weight), layout)


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts one below the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


LAYOUTS = {torch.float32: RowLayout.FLOAT32, torch.bfloat16: RowLayout.BFLOAT16}
"""Weights that are multiplied by float32 activations as they are."""
