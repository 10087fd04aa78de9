"""Attention of a step's tokens over the pages of their rows."""

from slipstream.ops.attention import native
from slipstream.ops.attention.cache import new_fp8_cache, raw_pages
from slipstream.ops.attention.native import apply_rope, attend_in_place, cut_tiles, serves_pages, write_cache
from slipstream.ops.attention.reference import attend_chunk, attend_pages, attend_single, rope_table
from slipstream.ops.platform.dispatch import by_device

# RoPE, with the norm per head before it and the KV cache write after it.

norm_rope = by_device(native.norm_rope, "slipstream.ops.attention.rope_triton")
rope_and_write_cache = by_device(native.rope_and_write_cache, "slipstream.ops.attention.rope_triton")


__all__ = [
    "apply_rope",
    "attend_chunk",
    "attend_in_place",
    "attend_pages",
    "attend_single",
    "cut_tiles",
    "new_fp8_cache",
    "norm_rope",
    "raw_pages",
    "rope_and_write_cache",
    "rope_table",
    "serves_pages",
    "write_cache",
]
