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
from typing import Any

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
from slipstream.ops.gemm.linear.measured import bfloat16_is_faster
from slipstream.ops.gemm.low_bit import Kernel
from slipstream.ops.gemm.quantized import dequantize as dequantize_matrix
from slipstream.ops.gemm.table import InvariantMatrix, Matrix, Run, Runs, TransposedMatrix
from slipstream.ops.platform.native import join_rows

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
        self.runs: list[Run] = []
        self._pieces: dict[int, CheckpointTensor] = {}
        self._missing = num_rows

    @abstractmethod
    def packed_kind(self, piece: CheckpointTensor) -> str | None:
        """The kind of a piece that stays packed, or None."""

    @abstractmethod
    def packed_bytes(self, kind: str | None, num_rows: int, num_columns: int) -> int:
        """Memory of such a run."""

    @abstractmethod
    def pack(self, kind: str | None, pieces: list[CheckpointTensor]) -> Matrix: ...

    @abstractmethod
    def lookup_in(self, matrix: Any, ids: torch.Tensor) -> torch.Tensor: ...

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self.num_columns), partial(self._fill, first_row), self._num_bytes)

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        self._pieces[first_row] = piece
        self._missing -= piece.shape[0]
        if self._missing == 0:
            pieces = [self._pieces[first] for first in sorted(self._pieces)]
            runs = [(kind, list(run)) for kind, run in groupby(pieces, self.packed_kind)]
            self.runs = [Run(self.pack(kind, run), sum(piece.shape[0] for piece in run)) for kind, run in runs]
            self._pieces = {}

    def _num_bytes(self, piece: CheckpointTensor) -> int:
        num_rows, num_columns = piece.shape
        return self.packed_bytes(self.packed_kind(piece), num_rows, num_columns)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        assert len(self.runs) == 1, f"lookup needs one tensor, this weight has {len(self.runs)} of different kinds"
        return self.lookup_in(self.runs[0].weight, ids)

    @property
    def matrix(self) -> Matrix:
        return Runs(self.runs)


class LowBitWeight(PackedWeight):
    def __init__(self, num_rows: int, num_columns: int, format: LowBit) -> None:
        super().__init__(num_rows, num_columns)
        self.format = format
        self._raw: torch.Tensor | None = None  # [rows, bytes per row], a view of the file; None for merged parts
        self._kind = ""  # of `_raw`

    def packed_kind(self, piece: CheckpointTensor) -> str | None:
        if piece.kind == BFLOAT16:
            return BFLOAT16 if self.format.keeps_bfloat16 else None
        return piece.kind if piece.kind in self.format.kernel.kinds and piece.blocks is not None else None

    def packed_bytes(self, kind: str | None, num_rows: int, num_columns: int) -> int:
        if kind is None or kind == BFLOAT16:
            return num_rows * num_columns * (4 if kind is None else 2)
        return self.format.kernel.num_bytes(kind, num_rows, num_columns)

    def pack(self, kind: str | None, pieces: list[CheckpointTensor]) -> Matrix:
        if kind is None or kind == BFLOAT16:
            dtype = torch.float32 if kind is None else torch.bfloat16
            return join_rows([piece.read().to(dtype) for piece in pieces])
        self.format.is_used = True
        parts = list(map(read_blocks, pieces))
        if len(parts) == 1:
            self._raw, self._kind = parts[0], kind
        return self.format.kernel.pack(kind, *parts)

    @property
    def matrix(self) -> Matrix:
        """torch's sums differ in the last bit between few and many tokens, and the rounding of a low-bit GEMM would
        amplify it; so beside low-bit weights float ones are batch-invariant."""
        return Runs(list(map(_invariant, self.runs)) if self.format.is_used else self.runs)

    def lookup_in(self, matrix: Any, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(matrix, torch.Tensor):
            return matrix.index_select(0, ids).float()
        found: torch.Tensor | None = matrix.lookup(ids)
        if found is not None:
            return found
        assert self._raw is not None, "lookup needs one tensor, this weight is merged from several"
        return dequantize(self._raw.index_select(0, ids), self._kind)


def _invariant(run: Run) -> Run:
    return run._replace(weight=InvariantMatrix(run.weight)) if isinstance(run.weight, torch.Tensor) else run


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

    @property
    def matrix(self) -> Matrix:
        return self.data

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.data.index_select(0, ids).float()


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

    @property
    def matrix(self) -> Matrix:
        return TransposedMatrix(self.data)

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
    @property
    def matrix(self) -> Matrix:
        return InvariantMatrix(self.data)


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

    def packed_kind(self, piece: CheckpointTensor) -> str | None:
        return piece.kind if piece.kind in GGUF_KINDS and piece.blocks is not None else None

    def packed_bytes(self, kind: str | None, num_rows: int, num_columns: int) -> int:
        if kind is None:
            return num_rows * num_columns * self.format.dtype.itemsize
        return gguf_bytes(kind, num_rows, num_columns)

    def pack(self, kind: str | None, pieces: list[CheckpointTensor]) -> Matrix:
        device, dtype = self.format.device, self.format.dtype
        if kind is not None:
            return gguf_matrix(join_rows(list(map(read_blocks, pieces))), kind, self.num_columns, device)
        counts = [piece.shape[0] for piece in pieces]
        rows = torch.empty((sum(counts), self.num_columns), dtype=dtype, device=device)
        for piece, part in zip(pieces, rows.split(counts), strict=True):
            piece.write_to(part)
        return rows

    def lookup_in(self, matrix: Any, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(matrix, torch.Tensor):
            return matrix.index_select(0, ids)
        return dequantize_matrix(matrix.select(lambda table: table.index_select(0, ids)), self.format.dtype)
