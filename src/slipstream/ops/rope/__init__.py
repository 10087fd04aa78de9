"""Rotary positions."""

from slipstream.ops.rope.reference import apply_rope, rope_table

__all__ = ["apply_rope", "rope_table"]
