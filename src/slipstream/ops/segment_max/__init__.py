"""Maximum or sum of each column over the tokens of each row, in place: a step's tokens may come in several parts."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.segment_max import reference

segment_add_into = by_device(reference.segment_add_into, "slipstream.ops.segment_max.triton")
segment_max_into = by_device(reference.segment_max_into, "slipstream.ops.segment_max.triton")

__all__ = ["segment_add_into", "segment_max_into"]
