"""GEMM with weights of 4 or 8 bits, by the best kernel for this machine."""

from slipstream.ops.low_bit.aten import DynamicQuant, Int4Pack
from slipstream.ops.low_bit.choose import find_kernel, is_correct
from slipstream.ops.low_bit.interleaved import Interleaved
from slipstream.ops.low_bit.kernel import Kernel, Packed
from slipstream.ops.low_bit.planes import Planes, make_planes
from slipstream.ops.low_bit.reference import add_group_sums, multiply

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
