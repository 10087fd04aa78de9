"""Maximum of each column over the tokens of each row."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.segment_max import reference

segment_max_into = by_device(reference.segment_max_into, "slipstream.ops.segment_max.triton")

__all__ = ["segment_max_into"]
