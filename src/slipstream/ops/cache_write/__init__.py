"""Writes the keys and values of a step into their pages."""

from slipstream.ops.cache_write.fp8 import new_fp8_cache, raw_pages
from slipstream.ops.cache_write.native import write_cache

__all__ = ["new_fp8_cache", "raw_pages", "write_cache"]
