"""Writes the keys and values of a step into their pages."""

from slipstream.ops.cache_write.native import write_cache

__all__ = ["write_cache"]
