"""Low-bit GEMM with our C kernel, on machines with a C compiler.

Weights keep the bits of the file; only their order changes: four rows are interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.ops import native
from slipstream.ops.dequant import BLOCK, split
from slipstream.ops.weight_rows import WeightRows


class Interleaved:
    """Activations are quantized to 16 bits, one scale per 32 of a row, so a row's result is independent of other
    rows."""

    name = "interleaved"
    rounding = ""
    _ROWS = 4

    def suits_machine(self) -> bool:
        """Compiles the kernels if necessary, so that the first run gives the same outputs as later ones."""
        return native.build()

    def pack(self, raw: torch.Tensor, kind: str) -> _InterleavedWeight:
        blocks = split(raw, kind)
        groups = blocks.scale.shape[1]
        offset = blocks.minimum
        if kind == "Q4_0":
            offset = blocks.scale * -8
        return _InterleavedWeight(
            # 4 columns of a row are one int32
            _interleave(blocks.bytes.view(torch.int32)),
            _interleave(blocks.scale.half()),
            None if offset is None else _interleave(offset.half()),
            groups * BLOCK,
            len(raw),
        )

    def num_bytes(self, kind: str, num_rows: int, num_columns: int) -> int:
        of_group = {"Q4_0": 20, "Q4_1": 20, "Q8_0": 34}[kind]
        return -(-num_rows // self._ROWS) * self._ROWS * (num_columns // BLOCK) * of_group


@dataclass(frozen=True, slots=True)
class _InterleavedWeight:
    data: torch.Tensor  # [rows / 4, groups, 4 or 8, 4] int32
    scale: torch.Tensor  # [rows / 4, groups, 1, 4] float16
    offset: torch.Tensor | None  # same shape; 4-bit weights only
    num_columns: int
    num_rows: int

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        library = native.library()
        assert library is not None
        if type(x) is not torch.Tensor:
            return x.new_empty(x.shape[0], self.num_rows)  # a meta or fake tensor: shape without data
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.num_rows)
        found = library.slip_low_bit(
            x.data_ptr(),
            self.data.data_ptr(),
            self.scale.data_ptr(),
            None if self.offset is None else self.offset.data_ptr(),
            out.data_ptr(),
            4 if self.offset is not None else 8,
            x.shape[0],
            self.num_rows,
            self.num_columns // BLOCK,
        )
        if not found:
            raise MemoryError("out of memory for the quantized activations of a low-bit GEMM")
        return out

    def run(self) -> WeightRows:
        bits = 8 if self.offset is None else 4
        return WeightRows(self.data, self.num_rows, bits, self.scale, self.offset)


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """[rows, groups, n] to [rows / 4, groups, n, 4 rows], padded with rows of zeros."""
    missing = -len(rows) % 4
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    return rows.unflatten(0, (-1, 4)).movedim(1, -1).contiguous()
