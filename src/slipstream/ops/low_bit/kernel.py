"""Kernel: one way of multiplying with low-bit weights, and how it wants them."""

from __future__ import annotations

from typing import Protocol

import torch

from slipstream.ops.weight_rows import WeightRows


class Packed(Protocol):
    """Weights as a kernel wants them."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, columns] float32 to [T, rows]."""

    def run(self) -> WeightRows | None:
        """As our C kernels read them, or None if they do not."""


class Kernel(Protocol):
    name: str
    rounding: str  # what activations are rounded to, if results show it; else empty

    def belongs(self) -> bool:
        """Whether this is a machine it is fast on. That it works at all is tried."""

    def pack(self, raw: torch.Tensor, kind: str) -> Packed:
        """From the packed bytes of a GGUF file, [rows, bytes of a row]."""

    def num_bytes(self, kind: str, num_rows: int, num_columns: int) -> int:
        """What such weights take once packed."""
