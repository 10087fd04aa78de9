"""Products of a few tokens on ARM, where torch's library is made for many and reaches half the speed."""

from __future__ import annotations

import platform

import torch

from slipstream.ops import native

_ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
_MOST = 32  # tokens; one alone is as fast by torch, which then only reads memory


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return _ON_ARM and 1 < len(x) <= _MOST and native.serves(x) and weight.dtype is x.dtype and weight.is_contiguous()


def few_tokens(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [tokens, in] times weight [out, in], transposed."""
    library = native.library()
    assert library is not None, "ask serves first"
    x = x.contiguous()
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, len(weight))
    library.slip_few_tokens(x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_tokens, len(weight), size)
    return out if bias is None else out.add_(bias)
