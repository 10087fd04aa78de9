"""TritonAttention: attention over pages by our own kernels, on CUDA.

The plan is a list of work made on the device; no device value is read on the host, and the launches of a step depend
on its shape alone: T, B, whether all rows have one token, and the largest of `max_lengths`. A plan captured in a graph
serves every step of that shape whose lengths stay within the `max_lengths` it was captured with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.nn.context import BatchView, ForwardContext, RelativeScores
from slipstream.ops.bidirectional_attention.triton import Tiles, attend_bidirectional, choose_cut, list_tiles
from slipstream.ops.paged_attention.triton import (
    Partials,
    attend_splits,
    attend_tiles,
    batch_invariant_shape,
    make_partials,
    num_split_programs,
    query_tile,
)
from slipstream.ops.paged_attention.work_list import WorkList, build_work_list

_ENDLESS = 2**30  # a window over everything


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    work: WorkList
    partials: Partials
    window: int  # 0: all keys are seen


@dataclass(frozen=True, slots=True)
class TritonPlan:
    groups: tuple[_GroupPlan, ...]  # per cache group
    has_chunks: bool  # some rows have more than one token
    has_single: bool = True  # some may have one
    bidirectional: Tiles | None = None  # of a model that keeps nothing in a cache


class TritonAttention:
    def __init__(
        self,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        windows: tuple[int, ...] = (0,),
        soft_cap: float = 0.0,
        one_kernel: bool = False,
    ) -> None:
        """`windows`: per cache group, how many keys a token sees, itself among them; 0 means all. Scores are bounded
        to `soft_cap` by tanh unless it is 0. With `one_kernel` a token's sums have the same order whether it comes
        alone or in a chunk."""
        self.page_size = page_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.windows = windows
        self.soft_cap = soft_cap
        self.tile = query_tile(head_dim, dtype.itemsize)
        self.one_kernel = one_kernel
        self.cut = choose_cut(head_dim, dtype)

    def plan(self, batch: BatchView, after: TritonPlan | None = None) -> TritonPlan:
        if not batch.page_tables:
            starts = batch.query_starts
            if starts is None:
                starts = torch.arange(len(batch.ids) + 1, dtype=torch.int32, device=batch.ids.device)
            return TritonPlan((), True, bidirectional=list_tiles(starts, len(batch.ids), self.cut, batch.num_seen))
        num_rows = len(batch.lengths)
        has_chunks = batch.num_single < num_rows
        num_tokens = len(batch.ids) if has_chunks else num_rows
        assert not has_chunks or batch.query_starts is not None, "rows of several tokens need query_starts"
        max_length = int(batch.max_lengths.max())
        # groups of one window have rows of the same lengths, hence the same work
        made: dict[int, _GroupPlan] = {}
        for group, window in enumerate(self.windows):
            if window not in made:
                work = build_work_list(
                    batch.lengths,
                    batch.query_starts if has_chunks else None,
                    batch.page_tables[group],
                    num_tokens,
                    max_length,
                    self.num_heads,
                    self.num_kv_heads,
                    self.page_size,
                    self.tile,
                    window,
                    num_split_programs(
                        batch.lengths.device,
                        self.dtype,
                        self.num_heads,
                        self.num_kv_heads,
                        self.head_dim,
                        self.page_size,
                        num_rows,
                        window,
                        self.soft_cap,
                    ),
                    cut_singles=not self.one_kernel,
                    given=batch.given,
                )
                if after is None:
                    partials = make_partials(work, self.num_heads, self.head_dim)
                else:
                    partials = after.groups[group].partials
                    assert len(partials.sums) == work.num_splits, "a plan after one of other rows"
                made[window] = _GroupPlan(work, partials, window)
        groups = tuple(made[window] for window in self.windows)
        return TritonPlan(groups, has_chunks or self.one_kernel, not batch.all_long and not self.one_kernel)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor,
        layer: int,
        scale: float,
        context: ForwardContext,
    ) -> torch.Tensor:
        keys, values = context.caches[layer]
        group = context.group_of_layer[layer]
        pages = context.batch.page_tables[group]
        plan: TritonPlan = context.plan
        mine = plan.groups[group]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.has_single:
            attend_splits(out, query, keys, values, pages, mine.work, mine.partials, scale, mine.window, self.soft_cap)
        if plan.has_chunks:
            shape, window = None, mine.window
            if self.one_kernel:
                # keys that all of a tile see are else computed without a mask; which those are depends on the chunk
                shape, window = batch_invariant_shape(keys), window or _ENDLESS
            attend_tiles(out, query, keys, values, pages, mine.work, scale, window, self.soft_cap, shape)
        return out

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
        plan: TritonPlan = context.plan
        assert plan.bidirectional is not None, "whole rows are for models that keep nothing in a cache"
        of_queries, of_keys = (None, None) if relative is None else (relative.of_queries, relative.of_keys)
        return attend_bidirectional(
            query, key, value, scale, plan.bidirectional, self.cut, reach, bias, of_queries, of_keys
        )
