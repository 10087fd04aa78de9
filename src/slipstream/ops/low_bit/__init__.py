"""Products with weights that stay at 4 or 8 bits, by the best kernel this machine has."""

from slipstream.ops.low_bit.aten import DynamicQuant, Int4Pack
from slipstream.ops.low_bit.choose import find_kernel, gives_right_product
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
    "gives_right_product",
    "make_planes",
    "multiply",
]
