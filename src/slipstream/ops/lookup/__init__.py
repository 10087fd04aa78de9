"""Where a forward pass begins: the vectors of tokens, and the angles of their positions."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.lookup import reference

look_up = by_device(reference.look_up, "slipstream.ops.lookup.triton")

__all__ = ["look_up"]
