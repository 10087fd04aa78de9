"""LowBit: weights of a GGUF file stay packed if the kernel of this machine can multiply their kind.

A matrix may be merged from parts of different kinds. Adjacent parts of one kind are packed and multiplied together;
bfloat16 parts stay bfloat16; other parts are float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import torch

from slipstream.nn.weight_format import CheckpointTensor, Weight, WeightTarget
from slipstream.ops import native
from slipstream.ops.dequant import dequantize
from slipstream.ops.linear import linear
from slipstream.ops.linear.bfloat16 import linear_bfloat16
from slipstream.ops.linear.native import skinny_gemm
from slipstream.ops.low_bit import Kernel, Packed
from slipstream.ops.weight_rows import WeightRows, dense_rows, join_rows

BFLOAT16 = "BF16"  # as GGUF files name it


@dataclass(slots=True)
class LowBit:
    """Keeps weights at 4 or 8 bits if the kernel has their kind; activations are float32."""

    kernel: Kernel
    keeps_bfloat16: bool = False
    is_used: bool = False  # whether some weight of the model is low-bit
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return LowBitWeight(num_rows, num_columns, self)


class PackedWeight(Weight):
    """A weight of runs of rows: adjacent parts of one kind. It reads its pieces when the last one has arrived, since
    the packing of a matrix depends on all its pieces."""

    allocates_when_filled = True

    def __init__(self, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.num_columns = num_columns
        self.runs: list[PackedRun] = []
        self._pieces: dict[int, CheckpointTensor] = {}
        self._missing = num_rows

    @abstractmethod
    def packed_kind(self, piece: CheckpointTensor) -> str | None:
        """The kind of a piece that stays packed, or None."""

    @abstractmethod
    def packed_bytes(self, kind: str | None, num_rows: int, num_columns: int) -> int:
        """Memory of such a run."""

    @abstractmethod
    def pack(self, kind: str | None, pieces: list[CheckpointTensor]) -> PackedRun: ...

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self.num_columns), partial(self._fill, first_row), self._num_bytes)

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        self._pieces[first_row] = piece
        self._missing -= piece.shape[0]
        if self._missing == 0:
            pieces = [self._pieces[first] for first in sorted(self._pieces)]
            self.runs = [self.pack(kind, list(run)) for kind, run in groupby(pieces, self.packed_kind)]
            self._pieces = {}

    def _num_bytes(self, piece: CheckpointTensor) -> int:
        num_rows, num_columns = piece.shape
        return self.packed_bytes(self.packed_kind(piece), num_rows, num_columns)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(self.runs) == 1:
            out = self.runs[0].multiply(x)
        else:
            out = torch.cat([run.multiply(x) for run in self.runs], -1)
        return out if bias is None else out.add_(bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        assert len(self.runs) == 1, f"lookup needs one tensor, this weight has {len(self.runs)} of different kinds"
        return self.runs[0].lookup(ids)

    def runs_for_kernels(self) -> list[WeightRows] | None:
        found = [run.for_kernels() for run in self.runs]
        return None if None in found else found  # type: ignore[return-value]


class LowBitWeight(PackedWeight):
    def __init__(self, num_rows: int, num_columns: int, format: LowBit) -> None:
        super().__init__(num_rows, num_columns)
        self.format = format

    def packed_kind(self, piece: CheckpointTensor) -> str | None:
        if piece.kind == BFLOAT16:
            return BFLOAT16 if self.format.keeps_bfloat16 else None
        return piece.kind if piece.kind in self.format.kernel.kinds and piece.blocks is not None else None

    def packed_bytes(self, kind: str | None, num_rows: int, num_columns: int) -> int:
        if kind is None or kind == BFLOAT16:
            return num_rows * num_columns * (4 if kind is None else 2)
        return self.format.kernel.num_bytes(kind, num_rows, num_columns)

    def pack(self, kind: str | None, pieces: list[CheckpointTensor]) -> PackedRun:
        if kind is None or kind == BFLOAT16:
            dtype = torch.float32 if kind is None else torch.bfloat16
            return _PlainRows(join_rows([piece.read().to(dtype) for piece in pieces]), self.format)
        self.format.is_used = True
        parts = list(map(read_blocks, pieces))
        return _PackedRows(self.format.kernel.pack(kind, *parts), kind, parts[0] if len(parts) == 1 else None)


class PackedRun(Protocol):
    """Adjacent rows that are multiplied together."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor: ...
    def lookup(self, ids: torch.Tensor) -> torch.Tensor: ...
    def for_kernels(self) -> WeightRows | None: ...


@dataclass(frozen=True, slots=True)
class _PackedRows:
    packed: Packed
    kind: str
    raw: torch.Tensor | None  # [rows, bytes per row], a view of the file; None for merged parts

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.multiply(x)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.packed.lookup(ids)
        if found is not None:
            return found
        assert self.raw is not None, "lookup needs one tensor, this weight is merged from several"
        return dequantize(self.raw.index_select(0, ids), self.kind)

    def for_kernels(self) -> WeightRows | None:
        return self.packed.run()


@dataclass(frozen=True, slots=True)
class _PlainRows:
    rows: torch.Tensor  # float32 or bfloat16
    format: LowBit

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        # torch's sums differ in the last bit between few and many tokens; the rounding of a low-bit GEMM would amplify
        # it
        if self.format.is_used and native.serves(x):
            return skinny_gemm(x, self.rows, None)
        if self.rows.dtype is torch.bfloat16:
            return linear_bfloat16(x, self.rows)
        return linear(x, self.rows)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows.index_select(0, ids).float()

    def for_kernels(self) -> WeightRows | None:
        return dense_rows(self.rows)


def read_blocks(piece: CheckpointTensor) -> torch.Tensor:
    """The packed bytes, [rows, bytes per row]."""
    assert piece.blocks is not None
    return piece.blocks()
