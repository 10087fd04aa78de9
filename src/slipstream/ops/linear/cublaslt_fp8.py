"""FP8 GEMMs of many rows that add to a residual, through cuBLASLt: torch has none that adds.

Each row of x and of the weight has a scale. For these cuBLASLt lists one algorithm, the one that torch takes.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch

from slipstream.ops.linear.cublaslt_tuned import CublasLtError, LtGemm, load_library

MIN_ROWS = 257  # with fewer rows GEMMs are split, and the next norm adds the partial sums
_ALIGNMENT = 256  # bytes; cuBLASLt assumes this alignment of a matrix when it lists algorithms
_lock = threading.Lock()  # addresses of scales are attributes of the operation, which engines of this process share


def adds_fp8(x: torch.Tensor, num_out: int, num_in: int) -> bool:
    """Whether `add_fp8_to` has an algorithm for as many rows as x has, on its device."""
    return x.is_cuda and len(x) >= MIN_ROWS and _find(x.device, len(x), num_out, num_in) is not None


def add_fp8_to(
    residual: torch.Tensor,  # [rows, out] bfloat16
    q: torch.Tensor,  # [rows, in] FP8
    scales: torch.Tensor,  # [rows, 1] float32
    weight: torch.Tensor,  # [out, in] FP8
    weight_scales: torch.Tensor,  # [out, 1] float32
) -> bool:
    """Adds the GEMM to the residual in place; False, without a change, if cuBLASLt cannot."""
    is_aligned = (residual.data_ptr() | q.data_ptr() | weight.data_ptr()) % _ALIGNMENT == 0
    if not is_aligned or not residual.is_contiguous() or residual.dtype is not torch.bfloat16:
        return False
    gemm = _find(q.device, len(q), *weight.shape) if len(q) >= MIN_ROWS else None
    if gemm is None:
        return False
    with _lock:
        gemm.set_scales(weight_scales, scales)
        gemm.run(0, q, weight, residual, add=True)
    return True


@lru_cache(maxsize=1024)
def _find(device: torch.device, rows: int, num_out: int, num_in: int) -> LtGemm | None:
    library = load_library()
    if library is None:
        return None
    try:
        gemm = LtGemm.of_fp8(library, device, rows, num_out, num_in)
    except CublasLtError:
        return None
    return gemm if gemm.num_algorithms else None
