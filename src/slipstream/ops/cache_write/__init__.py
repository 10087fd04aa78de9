"""Writes a step's keys and values into their pages."""

from slipstream.ops.cache_write.native import write_cache

__all__ = ["write_cache"]
