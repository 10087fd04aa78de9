"""GgufQuantized: weights of a GGUF file that stay low-bit on a GPU.

As on the CPU (`nn/low_bit_weight.py`), adjacent parts of one kind in a merged weight are multiplied together; parts of
other kinds (F16, Q3_K ...) are in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.nn.low_bit_weight import PackedRun, PackedWeight, read_blocks
from slipstream.nn.weight_format import CheckpointTensor, Weight
from slipstream.ops.linear import Activation, linear
from slipstream.ops.quantized import QuantizedMatrix, dequantize, quantized_linear
from slipstream.ops.quantized.gguf import GGUF_KINDS, gguf_bytes, gguf_matrix
from slipstream.ops.weight_rows import WeightRows, join_rows


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
        return dequantize(self.matrix.select(lambda table: table.index_select(0, ids)), self.dtype)

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
