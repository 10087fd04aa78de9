"""Skinny GEMM in C for up to 32 tokens on ARM CPUs, where torch's library reaches half the memory bandwidth."""

from __future__ import annotations

import platform

import torch

from slipstream.ops import native
from slipstream.ops.weight_rows import LAYOUTS

ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
MAX_TOKENS = 32


def accepts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return ON_ARM and len(x) <= MAX_TOKENS and native.serves(x) and weight.dtype is x.dtype and weight.is_contiguous()


def skinny_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    library = native.library()
    assert library is not None
    x = x.contiguous()
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, len(weight))
    layout = LAYOUTS[weight.dtype]
    library.slip_skinny_gemm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), layout, num_tokens, len(weight), size)
    return out if bias is None else out.add_(bias)
