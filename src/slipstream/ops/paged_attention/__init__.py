"""Attention of a step's tokens over the pages of their rows."""

from slipstream.ops.paged_attention.native import attend_decode, serves_decode
from slipstream.ops.paged_attention.reference import attend_chunk, attend_pages, attend_single

__all__ = ["attend_chunk", "attend_decode", "attend_pages", "attend_single", "serves_decode"]
