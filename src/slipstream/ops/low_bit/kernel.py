"""Kernel: the interface of a low-bit GEMM kernel and of its packed weights."""

from __future__ import annotations

from typing import Protocol

import torch

from slipstream.ops.weight_rows import WeightRows


class Packed(Protocol):
    """Weights in the layout of a kernel."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, columns] float32 to [T, rows]."""

    def lookup(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Rows `ids` [T] in float32, [T, columns], with the bits of `dequantize`; None if only the file has them."""

    def run(self) -> WeightRows | None:
        """The rows in the form that the fused C kernels read; None if they cannot read this layout."""


class Kernel(Protocol):
    name: str
    rounding: str  # the precision of rounded activations, if it changes results; else empty
    kinds: tuple[str, ...]  # GGUF kinds that it can pack; others are dequantized

    def suits_machine(self) -> bool:
        """Whether the kernel is fast on this machine. `is_correct` checks that it works."""

    def pack(self, kind: str, *parts: torch.Tensor) -> Packed:
        """Packs the bytes of GGUF tensors that are one weight, one below the other: [rows, bytes per row] uint8."""

    def num_bytes(self, kind: str, num_rows: int, num_columns: int) -> int:
        """Bytes of such a weight when packed."""
