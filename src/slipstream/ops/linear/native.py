"""Products through our C kernel for a few tokens on ARM, where torch's library is made for many and reaches half the
speed; everything else by the reference."""

from __future__ import annotations

import platform

import torch

from slipstream.ops import native
from slipstream.ops.linear import reference

_ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
_MOST = 32  # tokens


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if _ON_ARM and len(x) <= _MOST and native.serves(x) and weight.dtype is x.dtype and weight.is_contiguous():
        return few_tokens(x, weight, bias)
    return reference.linear(x, weight, bias)


def few_tokens(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    library = native.library()
    assert library is not None
    x = x.contiguous()
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, len(weight))
    library.slip_few_tokens(x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_tokens, len(weight), size)
    return out if bias is None else out.add_(bias)
