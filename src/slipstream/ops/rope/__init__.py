"""Rotary positions, and the norm before and the write into pages after them."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.rope import native
from slipstream.ops.rope.native import apply_rope
from slipstream.ops.rope.reference import rope_table

norm_rope = by_device(native.norm_rope, "slipstream.ops.rope.triton")
turn_and_write = by_device(native.turn_and_write, "slipstream.ops.rope.triton")

__all__ = ["apply_rope", "norm_rope", "rope_table", "turn_and_write"]
