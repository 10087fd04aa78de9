"""All that a layer may see of a step, passed down as an argument.

`BatchView` is what `runner/batch/input_batch.py` gathered; `ForwardContext` adds the caches and the attention plan.
Where of each row only the last token's hidden state is wanted, most of the last layer is for `LastTokens` alone.
Layers know tokens and positions. They know nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from slipstream.nn.attention.backend import AttentionBackend


@dataclass(frozen=True, slots=True)
class BatchView:
    """The tokens of one step, packed one row after another, single-token rows first.

    T tokens, B rows. Host values are exact counts the host decided on or upper bounds; device values are the truth.
    """

    # [T] int64 each; empty: vectors and angles were looked up already
    ids: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor  # [B] int64, positions each row has after this step
    # per group: [T] int64, where a token's keys go: page * page_size + place; empty: they are there already
    slots: tuple[torch.Tensor, ...]
    page_tables: tuple[torch.Tensor, ...]  # per group: [B, width] int64 pages, width = pages of the longest row

    num_tokens: NDArray[np.int32]  # host [B]
    max_lengths: NDArray[np.int32]  # host [B], at least `lengths`
    num_single: int  # host: leading rows that have one token
    all_long: bool = False  # host: it is known that no row has one token

    # [T] int64: the tokens that the host gave, -1 where the device drew one; None: not known. Only rows with given ones
    # complete pages that others read in the same step
    given: torch.Tensor | None = None
    rope_rows: torch.Tensor | None = None  # [T] int64, each token's row in the rope table; None: its position
    query_starts: torch.Tensor | None = None  # [B + 1] int32, first token of each row; None: one token a row
    token_types: torch.Tensor | None = None  # [T] int64, of encoders that tell two texts apart; None: all are 0
    # of rows with tokens that none sees, though they see the others: how many are seen, from the first on; None: all
    num_seen: torch.Tensor | None = None  # [B] int32
    host_seen: NDArray[np.int32] | None = None  # host [B], the same


@dataclass(frozen=True, slots=True)
class ForwardContext:
    batch: BatchView
    attention: AttentionBackend
    plan: Any  # what the backend made of the batch, for its own use
    caches: list[Any]  # per layer: (keys, values), each [pages, page_size, kv heads, head dim]
    group_of_layer: tuple[int, ...]
    only_last: bool = False  # the model gives a hidden state for each row, its last token's, not for each token
    rotary: tuple[torch.Tensor, ...] = ()  # per rope of the model: table rows of the step's tokens; set by the model

    def with_rotary(self, rotary: tuple[torch.Tensor, ...]) -> ForwardContext:
        return ForwardContext(
            self.batch, self.attention, self.plan, self.caches, self.group_of_layer, self.only_last, rotary
        )

    def last_places(self) -> torch.Tensor:
        """[B] int32: where each row's last token is. Rows that pad begin where the tokens end: they get the last."""
        starts = self.batch.query_starts
        assert starts is not None, "with one token a row all of them are the last"
        return starts[1:] - 1

    def last_tokens(self) -> LastTokens:
        batch, places = self.batch, self.last_places()
        num_rows = len(batch.lengths)
        alone = BatchView(
            ids=batch.ids[:0],
            positions=batch.positions[:0],
            lengths=batch.lengths,
            slots=(),
            page_tables=batch.page_tables,
            num_tokens=np.ones(num_rows, np.int32),
            max_lengths=batch.max_lengths,
            num_single=num_rows,
        )
        plan = self.attention.plan(alone, after=self.plan)
        return LastTokens(places, ForwardContext(alone, self.attention, plan, self.caches, self.group_of_layer))


@dataclass(frozen=True, slots=True)
class RelativeScores:
    """What positions add to attention scores before they are scaled, by the distance from a query to a key.

    Each [T, heads, 2 n - 1], n the longest row: the middle column for a token itself, the one after it for the next.
    """

    of_queries: torch.Tensor  # column (key - query + n - 1) of the query's line is added
    of_keys: torch.Tensor | None = None  # and the same column of the key's line


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each row, as a step of one token a row whose keys are in the pages already."""

    places: torch.Tensor  # [B] int32, in the step they belong to
    context: ForwardContext

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Theirs, of something that all tokens have."""
        return x.index_select(0, self.places)
