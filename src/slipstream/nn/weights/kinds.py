"""LowBit: weights of a GGUF file stay packed if the kernel of this machine can multiply their kind.

A matrix may be merged from parts of different kinds. Adjacent parts of one kind are packed and multiplied together;
bfloat16 parts stay bfloat16; other parts are float32.
"""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch

from slipstream.base.errors import BadCheckpoint
from slipstream.config.config import ModelConfig
from slipstream.nn.weights.source import open_folder
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    UnquantizedWeight,
    Weight,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.gemm.dequant import GGUF_KINDS, dequantize, gguf_bytes, gguf_matrix
from slipstream.ops.gemm.linear import Activation, linear
from slipstream.ops.gemm.linear.measured import bfloat16_is_faster, linear_bfloat16
from slipstream.ops.gemm.linear.tiles import linear_transposed, skinny_gemm
from slipstream.ops.gemm.low_bit import Kernel, Packed
from slipstream.ops.gemm.quantized import QuantizedMatrix, quantized_linear
from slipstream.ops.gemm.quantized import dequantize as dequantize_matrix
from slipstream.ops.platform import native
from slipstream.ops.platform.native import WeightRows, dense_rows, join_rows

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


# Bfloat16: weights of a bfloat16 checkpoint stay bfloat16 in a float32 model on a CPU.
#
# Activations and sums are float32, and the results are those of float32 weights. A step with few tokens is limited by
# the time to read the weights, which are half as many bytes.

KINDS = ("BF16", "bfloat16", "torch.bfloat16")
"""As safetensors and GGUF files, torch files, and tensors in memory name it."""


def stays_bfloat16(config: ModelConfig, device: torch.device) -> bool:
    """Whether every matrix of the checkpoint is bfloat16, and this machine computes at least as fast with them as with
    float32 weights. The C kernels are compiled if necessary."""
    if not config.keeps_bfloat16 or device.type != "cpu" or config.dtype != "float32" or config.deterministic:
        return False
    if config.info.dtype != "bfloat16" or config.load_format != "safetensors" or config.num_ranks > 1:
        return False
    matrices = {tensor.kind for tensor in open_folder(Path(config.path)) if len(tensor.shape) > 1}
    return bool(matrices) and matrices <= set(KINDS) and bfloat16_is_faster()


@dataclass(frozen=True, slots=True)
class Bfloat16:
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return Bfloat16Weight(num_rows, num_columns)


class Bfloat16Weight(Weight):
    refills = True

    def __init__(self, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.data = new_parameter(num_rows, num_columns, dtype=torch.bfloat16)

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self.data.shape[1]), partial(self._fill, first_row))

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        if piece.kind not in KINDS:
            raise BadCheckpoint(
                f"the weights of this model are stored as bfloat16, which would round new ones of {piece.kind}; give "
                'bfloat16 tensors, or start with dtype="float32"'
            )
        piece.write_to(self.data[first_row : first_row + piece.shape[0]])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_bfloat16(x, self.data, bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.data.index_select(0, ids).float()

    def runs_for_kernels(self) -> list[WeightRows] | None:
        run = dense_rows(self.data)
        return None if run is None else [run]


# Transposed: float weights stored as [columns, rows].
#
# GEMMs of many tokens on an ARM CPU are faster in this layout: those of MiniLM take 16.6 ms instead of 19.4 at 512
# tokens, 2.2 instead of 2.9 at 64.


@dataclass(frozen=True, slots=True)
class Transposed:
    dtype: torch.dtype
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return TransposedWeight(num_rows, num_columns, self.dtype)


class TransposedWeight(Weight):
    refills = True

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.data = new_parameter(num_columns, num_rows, dtype=dtype)

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self.data.shape[0]), partial(self._fill, first_row))

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        self.data[:, first_row : first_row + piece.shape[0]].copy_(piece.read().t())

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_transposed(x, self.data, bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.data.index_select(1, ids).t()


def transposed_is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype is torch.float32 and platform.machine().lower() in ("aarch64", "arm64")


# BatchInvariant: weights whose GEMMs give a row the same bits in every batch, for `--deterministic`.


@dataclass(frozen=True, slots=True)
class BatchInvariant:
    dtype: torch.dtype
    batch_invariant: bool = True

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return BatchInvariantWeight(num_rows, num_columns, self.dtype)


class BatchInvariantWeight(UnquantizedWeight):
    can_chain = False  # which kernels a chain uses depends on the number of rows

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from slipstream.ops.gemm.linear.triton import batch_invariant_linear  # needs triton; nn/sdpa.py checks it

        return batch_invariant_linear(x, self.data, bias)

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        activation: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # not fused: which kernel fuses the norm depends on the number of rows
        return Weight.multiply_normed(self, x, residual, norm, eps, bias, activation)

    def multiply_activated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        return Weight.multiply_activated(self, x, bias, activation)


# GgufQuantized: weights of a GGUF file that stay low-bit on a GPU.
#
# As on the CPU (`nn/weights/kinds.py`), adjacent parts of one kind in a merged weight are multiplied together; parts of
# other kinds (F16, Q3_K ...) are in the model's dtype.


@dataclass(frozen=True, slots=True)
class GgufQuantized:
    dtype: torch.dtype  # of activations
    device: torch.device
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return GgufWeight(num_rows, num_columns, self)


class GgufWeight(PackedWeight):
    def __init__(self, num_rows: int, num_columns: int, format: GgufQuantized) -> None:
        super().__init__(num_rows, num_columns)
        self.format = format

    def multiply_activated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        only = self.runs[0] if len(self.runs) == 1 else None
        if isinstance(only, _MatrixRun):
            return quantized_linear(x, only.matrix, bias, activation)
        return super().multiply_activated(x, bias, activation)

    def packed_kind(self, piece: CheckpointTensor) -> str | None:
        return piece.kind if piece.kind in GGUF_KINDS and piece.blocks is not None else None

    def packed_bytes(self, kind: str | None, num_rows: int, num_columns: int) -> int:
        if kind is None:
            return num_rows * num_columns * self.format.dtype.itemsize
        return gguf_bytes(kind, num_rows, num_columns)

    def pack(self, kind: str | None, pieces: list[CheckpointTensor]) -> PackedRun:
        device, dtype = self.format.device, self.format.dtype
        if kind is not None:
            return _MatrixRun(
                gguf_matrix(join_rows(list(map(read_blocks, pieces))), kind, self.num_columns, device), dtype
            )
        counts = [piece.shape[0] for piece in pieces]
        rows = torch.empty((sum(counts), self.num_columns), dtype=dtype, device=device)
        for piece, part in zip(pieces, rows.split(counts), strict=True):
            piece.write_to(part)
        return _FloatRun(rows)


@dataclass(frozen=True, slots=True)
class _MatrixRun:
    matrix: QuantizedMatrix
    dtype: torch.dtype

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, self.matrix)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return dequantize_matrix(self.matrix.select(lambda table: table.index_select(0, ids)), self.dtype)

    def for_kernels(self) -> WeightRows | None:
        return None


@dataclass(frozen=True, slots=True)
class _FloatRun:
    rows: torch.Tensor

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.rows)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows.index_select(0, ids)

    def for_kernels(self) -> WeightRows | None:
        return None
