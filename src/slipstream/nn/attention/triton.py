"""TritonAttention: attention over pages by our own kernels, on CUDA.

The plan is a list of work made on the device; no device value is read on the host, and the launches of a step depend
on its shape alone: T, B, whether all rows have one token, and the largest of `max_lengths`. A plan captured in a graph
serves every step of that shape whose lengths stay within the `max_lengths` it was captured with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.nn.context import BatchView, ForwardContext
from slipstream.ops.cache_write.triton import write_cache
from slipstream.ops.paged_attention.triton import Partials, attend_splits, attend_tiles, make_partials, query_tile
from slipstream.ops.paged_attention.work import Work, list_work


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    work: Work
    partials: Partials
    window: int  # 0: all keys are seen


@dataclass(frozen=True, slots=True)
class TritonPlan:
    groups: tuple[_GroupPlan, ...]  # per cache group
    has_chunks: bool  # some rows have more than one token


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
    ) -> None:
        """`windows`: per cache group, how many keys a token sees, itself among them; 0 means all. Scores are bounded
        to `soft_cap` by tanh unless it is 0."""
        self.page_size = page_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.windows = windows
        self.soft_cap = soft_cap
        self.tile = query_tile(head_dim, dtype.itemsize)

    def plan(self, batch: BatchView) -> TritonPlan:
        num_tokens, num_rows = len(batch.ids), len(batch.lengths)
        has_chunks = batch.num_single < num_rows
        assert has_chunks or num_tokens == num_rows, f"{num_tokens} tokens in {num_rows} rows of one"
        assert not has_chunks or batch.query_starts is not None, "rows of several tokens need query_starts"
        max_length = int(batch.max_lengths.max())
        # groups of one window have rows of the same lengths, hence the same work
        made: dict[int, _GroupPlan] = {}
        for group, window in enumerate(self.windows):
            if window not in made:
                work = list_work(
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
                )
                made[window] = _GroupPlan(work, make_partials(work, self.num_heads, self.head_dim), window)
        return TritonPlan(tuple(made[window] for window in self.windows), has_chunks)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
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
        write_cache(key, value, keys, values, context.batch.slots[group])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend_splits(out, query, keys, values, pages, mine.work, mine.partials, scale, mine.window, self.soft_cap)
        if plan.has_chunks:
            attend_tiles(out, query, keys, values, pages, mine.work, scale, mine.window, self.soft_cap)
        return out
