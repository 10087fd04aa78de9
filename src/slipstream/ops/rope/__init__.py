"""Rotary positions."""

from slipstream.ops.rope.native import apply_rope
from slipstream.ops.rope.reference import rope_table

__all__ = ["apply_rope", "rope_table"]
