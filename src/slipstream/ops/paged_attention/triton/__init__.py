"""Attention over pages on CUDA. All kernels run a fixed grid over the tile list that `tile_list.py` builds on the
device."""

from slipstream.ops.paged_attention.triton.decode import (
    DecodeRows,
    Partials,
    attend_splits,
    decode_shape,
    make_partials,
    queries_at_once,
    serves_single,
)
from slipstream.ops.paged_attention.triton.launch import KernelShape
from slipstream.ops.paged_attention.triton.varlen import attend_tiles, batch_invariant_shape, query_tile, varlen_shape

__all__ = [
    "DecodeRows",
    "KernelShape",
    "Partials",
    "attend_splits",
    "attend_tiles",
    "decode_shape",
    "make_partials",
    "queries_at_once",
    "query_tile",
    "serves_single",
    "batch_invariant_shape",
    "varlen_shape",
]
