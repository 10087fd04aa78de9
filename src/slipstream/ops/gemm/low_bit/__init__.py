"""GEMM with weights of 4 or 8 bits, by the best kernel for this machine."""

from slipstream.ops.gemm.low_bit.interleaved import Interleaved, find_kernel, is_correct
from slipstream.ops.gemm.low_bit.kernels import (
    DynamicQuant,
    Int4Pack,
    Kernel,
    Packed,
    Planes,
    add_group_sums,
    make_planes,
    multiply,
)

__all__ = [
    "DynamicQuant",
    "Int4Pack",
    "Interleaved",
    "Kernel",
    "Packed",
    "Planes",
    "add_group_sums",
    "find_kernel",
    "is_correct",
    "make_planes",
    "multiply",
]
