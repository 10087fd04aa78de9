"""Writes the keys and values of a step into their pages."""

from slipstream.ops.attention.cache_write.native import write_cache
from slipstream.ops.attention.cache_write.reference import new_fp8_cache, raw_pages

__all__ = ["new_fp8_cache", "raw_pages", "write_cache"]
