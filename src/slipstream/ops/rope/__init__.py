"""Rotary positions."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.rope import native
from slipstream.ops.rope.native import apply_rope
from slipstream.ops.rope.reference import rope_table

norm_rope = by_device(native.norm_rope, "slipstream.ops.rope.triton")

__all__ = ["apply_rope", "norm_rope", "rope_table"]
