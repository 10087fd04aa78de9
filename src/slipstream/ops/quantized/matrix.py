"""QuantizedMatrix: a weight [rows, columns] of 8 or 4 bits with a scale for each group of columns of a row.

    weight = scale * (q - zero)        symmetric: `zero` is one number for the matrix
    weight = scale * (q - zeros)       otherwise, with a zero for each scale

q is an FP8 number (e4m3), a signed 8-bit integer or an unsigned 4-bit integer. Two 4-bit numbers share a byte: byte b
of a segment of `half` bytes has column b of the segment in its low bits and column `half` + b in its high bits, so that
a kernel needs no permutation of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class QuantizedMatrix(NamedTuple):
    values: torch.Tensor  # [rows, columns] float8_e4m3fn or int8, or [rows, columns / 2] uint8
    scale: torch.Tensor  # [rows, groups] float32
    zeros: torch.Tensor | None  # [rows, groups] float32
    zero: int = 0

    @property
    def is_4_bit(self) -> bool:
        return self.values.dtype is torch.uint8

    @property
    def num_columns(self) -> int:
        return self.values.shape[1] * (2 if self.is_4_bit else 1)

    @property
    def group(self) -> int:
        """Columns per scale."""
        return self.num_columns // self.scale.shape[1]

    @property
    def half(self) -> int:
        """Bytes of a segment; 0 if a byte has one number."""
        return half_of(self.num_columns) if self.is_4_bit else 0

    def rows(self, first: int, count: int) -> QuantizedMatrix:
        rows = slice(first, first + count)
        zeros = None if self.zeros is None else self.zeros[rows]
        return QuantizedMatrix(self.values[rows], self.scale[rows], zeros, self.zero)


def half_of(num_columns: int) -> int:
    """The segment length of 4-bit numbers. Columns must be a multiple of 32."""
    assert num_columns % 32 == 0, f"4-bit numbers need columns in multiples of 32, not {num_columns}"
    return next(half for half in (64, 32, 16) if num_columns % (2 * half) == 0)


def pack_4_bit(q: torch.Tensor) -> torch.Tensor:
    """q [rows, columns] uint8 of 0 to 15, to [rows, columns / 2]."""
    low, high = q.unflatten(1, (-1, 2, half_of(q.shape[1]))).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_4_bit(packed: torch.Tensor) -> torch.Tensor:
    """The opposite of `pack_4_bit`."""
    pairs = packed.unflatten(1, (-1, half_of(2 * packed.shape[1])))
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)
