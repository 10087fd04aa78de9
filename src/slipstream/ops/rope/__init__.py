"""RoPE, with the norm per head before it and the KV cache write after it."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.rope import native
from slipstream.ops.rope.native import apply_rope
from slipstream.ops.rope.reference import rope_table

norm_rope = by_device(native.norm_rope, "slipstream.ops.rope.triton")
rope_and_write_cache = by_device(native.rope_and_write_cache, "slipstream.ops.rope.triton")

__all__ = ["apply_rope", "norm_rope", "rope_table", "rope_and_write_cache"]
