"""Drafter: proposes the tokens that a row will probably draw next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.config.config import DraftConfig
from slipstream.contracts.cache_spec import CacheGroup
from slipstream.nn.context import AttentionBackend, BatchView, ForwardContext
from slipstream.ops.sampling import MatchRule, RowHistory, propose_from_history_
from slipstream.runner.rows import PageTables, RowTable, TokenHistory
from slipstream.runner.stores import KVStore


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The draws of a step. The row table has each row's last token and length already."""

    rows: torch.Tensor  # device [S] int64; the rows of a step with drafts repeat
    offsets: torch.Tensor | None  # device [S] int64, index of the draw among its row's; None: each row has one draw
    positions: torch.Tensor  # device [S] int64, of the drawn token; arbitrary for padding
    tokens: torch.Tensor  # device [S] int64, as drawn, accepted or not
    hidden: torch.Tensor  # device [S, hidden], of the position before the drawn token
    max_length: int  # host: at least the number of tokens of every row
    num_rows: int  # host: at least the number of rows, each counted once
    returned: torch.Tensor | None = None  # device [S, drafts] int64: memory for drafts that leave with the results


class Drafter(Protocol):
    """The last part of a step's head. Drafts never change tokens: a draft counts only if the row then draws it. One
    that computes the tokens of prompts too is also a `StepFeature`."""

    # Also runs in steps that need no drafts, with `num_drafts` 0, to store what later steps read; unless plans let it
    # catch up later.
    always_runs: bool
    reads_hidden: bool  # reads the hidden states of all tokens of a step
    fills_returned: bool  # writes drafts to `DraftBatch.returned` too, at the first draw of each row

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        """Device: write `num_drafts` drafts of each row to `RowTable.next_tokens`, after the token that the row drew
        last; -1: no draft. May be captured in a graph: reads no device value on the host."""


# NgramDrafter: proposes what followed the last tokens of a row when they occurred before in the same row.
#
# The methods `ngram` and `suffix` differ in their `MatchRule`: an n-gram match has a few tokens and gives as many
# drafts as are asked for; a suffix match is as long as possible, and a longer match gives more drafts.


class NgramDrafter:
    always_runs = False
    reads_hidden = False
    fills_returned = True

    def __init__(self, config: DraftConfig, rows: RowTable, history: TokenHistory) -> None:
        self.rule = MatchRule(config.min_match, config.max_match, config.drafts_per_match or math.inf)
        self._rows = rows
        self._history = history

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        text = RowHistory(self._rows.next_tokens, self._rows.computed, self._history.table, self._history.tokens)
        propose_from_history_(batch.rows, batch.offsets, text, num_drafts, self.rule, batch.max_length, batch.returned)


# DraftCache: the KV cache of a drafter that runs a model, in the pages of the target's requests.
#
# The drafter's cache sites follow the target's in the cache specs. Sites of equal spec share a page table, so a prefix
# hit, a preemption and a page copy apply to both models. Positions after the last computed one have no pages yet: keys
# of drafts go to scratch pages, which each row has for itself and which the next step overwrites.


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of one token each, on the device. A row may occur several times, at different positions."""

    rows: torch.Tensor  # [n] int64
    positions: torch.Tensor  # [n] int64
    pages: tuple[torch.Tensor, ...]  # per group of the drafter: [n, width] int64
    max_length: int  # host: more than all positions

    def repeated(self, count: int) -> DraftRows:
        """Each row `count` times, at its position and the ones after it."""
        after = torch.arange(count, device=self.rows.device)
        positions = (self.positions.unsqueeze(1) + after).view(-1)
        pages = tuple(table.repeat_interleave(count, 0, output_size=count * len(table)) for table in self.pages)
        rows = self.rows.repeat_interleave(count, output_size=count * len(self.rows))
        return replace(self, rows=rows, pages=pages).at(positions)

    def at(self, positions: torch.Tensor) -> DraftRows:
        """The same rows at other positions."""
        return replace(self, positions=positions.clamp(max=self.max_length - 1))

    def and_then(self, others: DraftRows) -> DraftRows:
        pages = tuple(torch.cat(pair) for pair in zip(self.pages, others.pages, strict=True))
        rows = torch.cat([self.rows, others.rows])
        return DraftRows(rows, torch.cat([self.positions, others.positions]), pages, self.max_length)


@dataclass(frozen=True, slots=True)
class DraftChunks:
    """Consecutive positions of rows, on the device, row after row. All of them have pages."""

    token_rows: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    lengths: torch.Tensor  # [B] int64, positions of each row up to the last of its chunk
    query_starts: torch.Tensor  # [B + 1] int32, first token of each row
    pages: tuple[torch.Tensor, ...]  # per group of the drafter: [B, width] int64
    max_length: int  # host: at least all lengths


def own_groups(groups: Sequence[CacheGroup], first_site: int) -> dict[int, CacheGroup]:
    """The groups that have sites from `first_site` on, by their numbers, with these sites only, numbered from 0."""
    own = {
        number: CacheGroup(group.spec, tuple(site - first_site for site in group.sites if site >= first_site))
        for number, group in enumerate(groups)
    }
    return {number: group for number, group in own.items() if group.sites}


class DraftCache:
    def __init__(self, store: KVStore, tables: PageTables, attention: AttentionBackend, max_length: int) -> None:
        """`attention`: for the groups of the drafter, `own_groups`; `max_length`: maximum positions of a row."""
        assert store.scratch is not None
        self.max_length = max_length
        self._store = store
        self._tables = tables
        self._attention = attention
        self._scratch = store.scratch
        groups = own_groups(store.groups, self._scratch.first_site)
        self._numbers = tuple(groups)
        group_of_site = {site: index for index, group in enumerate(groups.values()) for site in group.sites}
        self._group_of_site = tuple(group_of_site[site] for site in range(len(group_of_site)))
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def tables(self) -> torch.Tensor:
        """The page tables of all groups of the engine [groups, rows, pages per row]."""
        return self._tables.tables

    def of_step(self, context: ForwardContext) -> ForwardContext:
        """Device: the context in which the drafter computes the tokens of the target's step."""
        batch = context.batch
        view = replace(
            batch,
            slots=tuple(batch.slots[number] for number in self._numbers),
            page_tables=tuple(batch.page_tables[number] for number in self._numbers),
            rope_rows=None,
            lora=None,
            last_lora=None,
        )
        return self._context(view, only_last=batch.query_starts is not None)

    def to_write(self, context: ForwardContext) -> ForwardContext:
        """Device: the context in which the drafter stores entries of the tokens of the target's step and attends to
        none."""
        batch = context.batch
        view = replace(batch, slots=tuple(batch.slots[number] for number in self._numbers), lora=None, last_lora=None)
        return replace(context, batch=view, caches=self._own_caches(), group_of_site=self._group_of_site, metadata=None)

    def of_rows(
        self, ids: torch.Tensor, rows: DraftRows, lengths: torch.Tensor | None = None, *, attends: bool = True
    ) -> ForwardContext:
        """Device: the context in which the drafter computes one token of each row. `lengths` [n]: the positions that
        each token sees; None: those up to its own. Without `attends` it stores entries only."""
        num, page_size = len(rows.rows), self._tables.page_size
        entries = (rows.positions // page_size).unsqueeze(1)
        view = BatchView(
            ids=ids,
            positions=rows.positions,
            lengths=rows.positions + 1 if lengths is None else lengths,
            slots=tuple(
                pages.gather(1, entries).squeeze(1) * page_size + rows.positions % page_size for pages in rows.pages
            ),
            page_tables=rows.pages,
            num_tokens=np.ones(num, np.int32),
            max_lengths=np.full(num, rows.max_length, np.int32),
            num_single=num,
        )
        return self._context(view, attends=attends)

    def chunks(
        self, rows: torch.Tensor, starts: torch.Tensor, numbers: torch.Tensor, total: int, max_length: int
    ) -> DraftChunks:
        """Device: `numbers` positions of each row from `starts` on, all [B]. `total`: host, the sum of the numbers."""
        index = torch.arange(len(rows), device=rows.device).repeat_interleave(numbers, output_size=total)
        ends = numbers.cumsum(0)
        offsets = torch.arange(total, device=rows.device) - (ends - numbers).index_select(0, index)
        query_starts = torch.cat([torch.zeros_like(ends[:1]), ends]).to(torch.int32)
        pages = self.computed_rows(rows, starts, max_length).pages
        token_rows, positions = rows.index_select(0, index), starts.index_select(0, index) + offsets
        return DraftChunks(token_rows, positions, starts + numbers, query_starts, pages, max_length)

    def of_chunks(self, ids: torch.Tensor, chunks: DraftChunks, num_tokens: NDArray[np.int32]) -> ForwardContext:
        """Device: the context in which the drafter computes chunks; those of one token come first. `num_tokens`: host,
        of each row."""
        page_size, tables = self._tables.page_size, self._tables.tables
        at = chunks.token_rows * self._tables.width + chunks.positions // page_size
        view = BatchView(
            ids=ids,
            positions=chunks.positions,
            lengths=chunks.lengths,
            slots=tuple(
                tables[number].view(-1).index_select(0, at) * page_size + chunks.positions % page_size
                for number in self._numbers
            ),
            page_tables=chunks.pages,
            num_tokens=num_tokens,
            max_lengths=np.full(len(num_tokens), chunks.max_length, np.int32),
            num_single=int(np.count_nonzero(num_tokens == 1)),
            query_starts=chunks.query_starts,
        )
        return self._context(view, only_last=True)

    def computed_rows(self, rows: torch.Tensor, positions: torch.Tensor, max_length: int) -> DraftRows:
        """Device: rows at positions that have pages. `max_length`: more than all positions."""
        width = self._tables.width_of(max_length)
        # cut first: the tables are as wide as the longest row that the engine supports
        pages = tuple(self._tables.tables[number, :, :width].index_select(0, rows) for number in self._numbers)
        return DraftRows(rows, positions, pages, max_length)

    def drafted_rows(self, rows: torch.Tensor, computed: torch.Tensor, max_length: int) -> DraftRows:
        """Device: rows at the position after their `computed` positions, with scratch pages from there on."""
        found = self.computed_rows(rows, computed.clamp(max=max_length - 1), max_length)
        page_size = self._tables.page_size
        entries = torch.arange(self._tables.width_of(max_length), device=rows.device)
        # how many pages after that of the last computed position
        after = entries - ((computed - 1) // page_size).unsqueeze(1) - 1
        is_own = (after >= 0) & (after < self._scratch.pages_per_row)
        own = rows.unsqueeze(1) * self._scratch.pages_per_row + after
        pages = tuple(
            torch.where(is_own, own + self._first_scratch_page(number), table.masked_fill(after >= 0, 0))
            for number, table in zip(self._numbers, found.pages, strict=True)
        )
        return replace(found, pages=pages)

    def _first_scratch_page(self, group: int) -> int:
        """The scratch pages are the last ones of each of the drafter's sites."""
        site = self._store.groups[group].sites[-1]
        return len(self._store.caches[site][0]) - self._scratch.num_pages

    def _context(self, view: BatchView, only_last: bool = False, attends: bool = True) -> ForwardContext:
        metadata = self._attention.make_metadata(view) if attends else None
        return ForwardContext(view, self._attention, metadata, self._own_caches(), self._group_of_site, only_last)

    def _own_caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        caches, first = self._store.caches, self._scratch.first_site
        if not self._caches or self._caches[0] is not caches[first]:  # the store has allocated its pages again
            self._caches = caches[first:]
        return self._caches
