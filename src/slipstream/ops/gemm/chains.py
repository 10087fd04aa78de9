"""Inputs that one GEMM of a chain leaves to the next: GEMMs in sequence with a residual add and an RMS norm between.

The first GEMM adds the residual and returns the sum before its norm, as an `Unnormalized`. An RMS norm divides a row by
one number, so the division can follow the next GEMM. In a "streaming" chain (`linear/streaming_hopper.py`) the first
GEMM also multiplies by the norm's weights and stores sums of squares, one per row and block of outputs; the second GEMM
adds these up and divides. The norm then has no kernel of its own. In a "library" chain the norm has its own kernel,
which may also add the partial sums of a split GEMM.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from slipstream.ops.elementwise import rms_norm

Chain = Literal["streaming", "library", ""]
"""streaming: the Hopper kernel, norms fused. library: cuBLAS, norms apart. "": no chain, single GEMMs are faster."""


class Unnormalized(NamedTuple):
    """Rows before their RMS norm. The next GEMM finishes the norm (with `squares`), computes it, or takes `normed`."""

    total: torch.Tensor  # [rows, size] the sum with the residual; also the next residual
    norm: torch.Tensor  # [size] weights
    eps: float
    weighted: torch.Tensor | None = None  # [rows, size] total times the norm's weights
    squares: torch.Tensor | None = None  # [rows, blocks] float32, sums of squares of each block of `total`
    normed: torch.Tensor | None = None  # [rows, size] the norm, if it is computed already
    quantized: Fp8Rows | None = None  # the norm in FP8

    def rows_normed(self) -> torch.Tensor:
        """The norm, [rows, size], of rows that are not `weighted`."""
        assert self.squares is None, "the next GEMM finishes this norm"
        return rms_norm(self.total, self.norm, self.eps) if self.normed is None else self.normed

    @property
    def is_cuda(self) -> bool:
        """With `dtype`, so that ops choose their implementation for these rows as for a tensor."""
        return self.total.is_cuda

    @property
    def dtype(self) -> torch.dtype:
        return self.total.dtype


class Fp8Rows(NamedTuple):
    """Rows that are quantised to FP8, with a scale for each."""

    values: torch.Tensor  # [rows, in]
    scales: torch.Tensor  # [rows, 1] float32
    dtype: torch.dtype  # of the product


class StreamingRows(NamedTuple):
    """The input of a GEMM that streams its weight."""

    x: torch.Tensor  # [rows, in]
    squares: torch.Tensor | None = None  # if the GEMM finishes the norm of x
    eps: float = 0.0

    @classmethod
    def of(cls, x: torch.Tensor | Unnormalized) -> StreamingRows:
        if isinstance(x, torch.Tensor):
            return cls(x)
        assert x.weighted is not None and x.squares is not None, "the GEMM before did not stream its weight"
        return cls(x.weighted, x.squares, x.eps)

    def arguments(
        self,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        made: Unnormalized | None,
    ) -> tuple[torch.Tensor | float | None, ...]:
        """Of the kernels that stream a weight, in their order: from `squares` to `made`."""
        norm, weighted, squares = (None, None, None) if made is None else (made.norm, made.weighted, made.squares)
        return self.squares, self.eps, bias, residual, norm, out, weighted, squares
