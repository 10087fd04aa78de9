"""Products with weights that stay at 4 bits, by the kernels torch has for this machine."""

from slipstream.ops.low_bit.aten import DynamicQuant, Int4Pack, Kernel, Packed, find_kernel
from slipstream.ops.low_bit.planes import Planes, make_planes
from slipstream.ops.low_bit.reference import add_group_sums, multiply

__all__ = [
    "DynamicQuant",
    "Int4Pack",
    "Kernel",
    "Packed",
    "Planes",
    "add_group_sums",
    "find_kernel",
    "make_planes",
    "multiply",
]
