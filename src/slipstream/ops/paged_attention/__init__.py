"""Attention of a step's tokens over the pages of their rows."""

from slipstream.ops.paged_attention.native import attend_in_place, cut_tiles, serves_pages
from slipstream.ops.paged_attention.reference import attend_chunk, attend_pages, attend_single

__all__ = ["attend_chunk", "attend_in_place", "attend_pages", "attend_single", "cut_tiles", "serves_pages"]
