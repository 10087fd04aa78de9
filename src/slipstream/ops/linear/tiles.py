"""GEMM of many tokens by AMX tiles, with the precision of float32, on x86 processors that have them.

`native_gemm_amx.h` splits float32 numbers into three bfloat16 parts. Weights are float32 or bfloat16.
"""

from __future__ import annotations

import torch

from slipstream.ops import native
from slipstream.ops.weight_rows import LAYOUTS

MIN_TOKENS = 17  # not measured for fewer: the C kernel for few tokens takes those


def accepts(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if len(x) < MIN_TOKENS or weight.dtype not in LAYOUTS or not weight.is_contiguous() or not native.serves(x):
        return False
    library = native.library()
    return library is not None and bool(library.slip_has_gemm())


def tile_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    library = native.library()
    assert library is not None
    x = x.contiguous()
    out = torch.empty(len(x), len(weight), dtype=torch.float32)
    sizes = (LAYOUTS[weight.dtype], len(x), len(weight), x.shape[1])
    if not library.slip_gemm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes):
        raise MemoryError(f"out of memory for the split activations of a GEMM of {len(x)} tokens")
    return out if bias is None else out.add_(bias)
