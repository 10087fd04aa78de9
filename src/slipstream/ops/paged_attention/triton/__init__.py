"""Attention over pages on CUDA. All kernels run a fixed grid over the tile list that `tile_list.py` builds on the
device."""

from slipstream.ops.paged_attention.triton.decode import (
    Partials,
    attend_splits,
    decode_shape,
    has_row_programs,
    make_partials,
    num_split_programs,
    queries_at_once,
    serves_single,
)
from slipstream.ops.paged_attention.triton.launch import KernelShape
from slipstream.ops.paged_attention.triton.varlen import attend_tiles, batch_invariant_shape, query_tile, varlen_shape

__all__ = [
    "KernelShape",
    "Partials",
    "attend_splits",
    "attend_tiles",
    "decode_shape",
    "has_row_programs",
    "make_partials",
    "num_split_programs",
    "queries_at_once",
    "query_tile",
    "serves_single",
    "batch_invariant_shape",
    "varlen_shape",
]
