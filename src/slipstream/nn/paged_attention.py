"""TritonAttention: attention over pages with our Triton kernels, on CUDA.

The metadata of a group is a tile list built on the device; no device value is read on the host. The launches of a step
depend only on T, B, whether all rows have one token, `max_queries`, and the largest of `max_lengths`. Metadata captured
in a graph is valid for every step of that shape whose lengths are within the `max_lengths` of the capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.contracts.cache_spec import CacheGroup, PagedSpec
from slipstream.nn.context import BatchView, ForwardContext, RelativeScores
from slipstream.nn.shapes import has_only
from slipstream.ops.attention.bidirectional_triton import (
    Cut,
    Tiles,
    attend_bidirectional,
    choose_cut,
    list_tiles,
)
from slipstream.ops.attention.tile_list import (
    TileList,
    TileListHeads,
    TileListRows,
    TileListSplits,
    build_tile_list,
    num_distinct,
)
from slipstream.ops.attention.varlen import (
    DecodeRows,
    Partials,
    attend_splits,
    attend_tiles,
    batch_invariant_shape,
    make_partials,
    queries_at_once,
    query_tile,
    serves_single,
)

_NO_WINDOW = 2**30  # larger than any sequence
# Fields of a cache spec that the kernel of a single token implements, those of Hopper, and those of all GPUs.
_KNOWN_OF_SINGLE = {"num_heads", "num_kv_heads", "head_dim", "dtype", "page_size"}
_KNOWN_OF_PLAIN = _KNOWN_OF_SINGLE | {"window", "sinks"}
_KNOWN = _KNOWN_OF_PLAIN | {"soft_cap", "value_dim"}
_LATENT_HEADS = 16  # of one program


@dataclass(frozen=True, slots=True)
class _GroupMetadata:
    tile_list: TileList
    partials: Partials
    window: int  # 0: all keys are visible
    soft_cap: float


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    groups: tuple[_GroupMetadata, ...]  # per cache group
    has_chunks: bool  # some rows have more than one token
    has_single: bool = True  # some rows may have one token
    bidirectional: dict[Cut, Tiles] | None = None  # only for models without a cache


class TritonAttention:
    def __init__(
        self,
        groups: Sequence[CacheGroup],
        dtype: torch.dtype,
        head_dims: Sequence[int] = (),
        one_kernel: bool = False,
    ) -> None:
        """`dtype`: of queries; `head_dims`: of bidirectional attention. With `one_kernel` the order of a token's sums
        is the same whether it is alone or in a chunk."""
        for group in groups:
            assert has_only(group.spec, _KNOWN), f"no kernel implements all of {group.spec}"
        self.groups = tuple(groups)
        self.plain = [has_only(group.spec, _KNOWN_OF_PLAIN) for group in groups]
        self.may_be_single = [has_only(group.spec, _KNOWN_OF_SINGLE) for group in groups]
        self.dtype = dtype
        self.one_kernel = one_kernel
        self.cuts = {dim: choose_cut(dim, dtype) for dim in head_dims}

    def make_metadata(self, batch: BatchView, after: TritonMetadata | None = None) -> TritonMetadata:
        if not batch.page_tables:
            starts = batch.query_starts
            if starts is None:
                starts = torch.arange(len(batch.ids) + 1, dtype=torch.int32, device=batch.ids.device)
            cuts = {cut: list_tiles(starts, len(batch.ids), cut, batch.num_seen) for cut in self.cuts.values()}
            return TritonMetadata((), True, bidirectional=cuts)
        has_chunks = batch.num_single < len(batch.lengths)
        assert not has_chunks or batch.query_starts is not None, "rows of several tokens need query_starts"
        groups = tuple(
            self._group_metadata(number, batch, has_chunks, None if after is None else after.groups[number].partials)
            for number in range(len(self.groups))
        )
        return TritonMetadata(groups, has_chunks or self.one_kernel, not batch.all_long and not self.one_kernel)

    def _group_metadata(
        self, number: int, batch: BatchView, has_chunks: bool, partials: Partials | None
    ) -> _GroupMetadata:
        """`partials`: buffers of other metadata for the same rows, to be reused."""
        group, num_rows = self.groups[number], len(batch.lengths)
        spec = group.spec
        num_kv_heads, dim = _num_kv_heads(spec), spec.value_dim or spec.head_dim
        max_queries = 1
        if batch.max_queries > 1 and not has_chunks and not self.one_kernel:
            num_in_group = spec.num_heads // num_kv_heads
            max_queries = queries_at_once(dim, num_in_group, batch.max_queries, is_latent=bool(spec.value_dim))
        rows = DecodeRows(
            batch.lengths.device,
            torch.float8_e4m3fn if spec.dtype == "fp8" else self.dtype,
            spec.num_heads,
            num_kv_heads,
            dim,
            spec.page_size,
            num_distinct(num_rows, max_queries),
            group.window,
            is_plain=self.plain[number],
            has_drafts=max_queries > 1,
        )
        tile = query_tile(dim, self.dtype.itemsize)
        tile_list = build_tile_list(
            TileListRows(
                batch.lengths,
                batch.query_starts if has_chunks else None,
                batch.page_tables[number],
                len(batch.ids) if has_chunks else num_rows,
                int(batch.max_lengths.max()),
                batch.host_ids,
                max_queries,
            ),
            TileListHeads(spec.num_heads, num_kv_heads, spec.page_size, tile, group.window),
            TileListSplits(
                rows.num_programs,
                one_split=rows.one_split,
                cut_singles=not self.one_kernel,
                row_programs=rows.has_row_programs,
            ),
        )
        if partials is None:
            partials = make_partials(tile_list, spec.num_heads, dim)
        assert len(partials.sums) == tile_list.num_splits, "partial buffers of metadata for other rows"
        return _GroupMetadata(tile_list, partials, group.window, spec.soft_cap)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        site: int,
        scale: float,
        context: ForwardContext,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = context.caches[site]
        group = context.group_of_site[site]
        pages = context.batch.page_tables[group]
        metadata: TritonMetadata = context.metadata
        mine = metadata.groups[group]
        cap = mine.soft_cap
        num_kv_heads = _num_kv_heads(self.groups[group].spec)
        keys, values = (cache.expand(-1, -1, num_kv_heads, -1) for cache in (keys, values))
        out = torch.empty((*query.shape[:2], values.shape[3]), dtype=query.dtype, device=query.device)
        if metadata.has_single:
            attend_splits(
                out, query, keys, values, pages, mine.tile_list, mine.partials, scale, mine.window, cap, sinks
            )
        if metadata.has_chunks:
            shape, window = None, mine.window
            if self.one_kernel:
                # with a window every block is masked; without one, blocks visible to a whole tile skip the mask, which
                # depends on the chunk
                shape, window = batch_invariant_shape(values), window or _NO_WINDOW
            attend_tiles(out, query, keys, values, pages, mine.tile_list, scale, window, cap, sinks, shape)
        return out

    def forward_single(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        rotary: torch.Tensor,
        site: int,
        scale: float,
        context: ForwardContext,
    ) -> torch.Tensor | None:
        keys, values = context.caches[site]
        group = context.group_of_site[site]
        metadata: TritonMetadata = context.metadata
        mine, batch = metadata.groups[group], context.batch
        # without host_ids the keys before the last may belong to this step
        is_alone = len(batch.lengths) == 1 and batch.host_ids is not None and not metadata.has_chunks
        if not (is_alone and self.may_be_single[group] and serves_single(query_key, value, rotary, keys)):
            return None
        from slipstream.ops.attention.hopper_single import attend_single

        row = (batch.slots[group], batch.page_tables[group], mine.tile_list, mine.partials)
        return attend_single(query_key, value, norm, eps, rotary, keys, values, *row, scale)

    def bidirectional(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        context: ForwardContext,
        reach: int = 0,
        bias: torch.Tensor | None = None,
        relative: RelativeScores | None = None,
    ) -> torch.Tensor:
        metadata: TritonMetadata = context.metadata
        assert metadata.bidirectional is not None, "bidirectional attention is for models without a cache"
        cut = self.cuts[query.shape[-1]]
        of_queries, of_keys = (None, None) if relative is None else (relative.of_queries, relative.of_keys)
        return attend_bidirectional(
            query, key, value, scale, metadata.bidirectional[cut], cut, reach, bias, of_queries, of_keys
        )


def _num_kv_heads(spec: PagedSpec) -> int:
    """KV heads as the kernels see them. All heads of latent attention (MLA) share one. It is given to the kernels as
    several at the same address: the sums of all heads would not fit the registers of a program."""
    if spec.value_dim and spec.num_heads % _LATENT_HEADS == 0:
        return spec.num_heads // _LATENT_HEADS
    return spec.num_kv_heads
