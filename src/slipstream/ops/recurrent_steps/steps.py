"""RecurrentSteps: what recurrent ops need to know of a step's rows. Made once per step; all layers reuse it.

The row of a step computes positions [p, p + n). Kernels cut them into chunks at multiples of STATE_CHUNK, counted from
position 0, so that chunks hardly depend on how the scheduler cuts a prompt. B rows, T tokens, packed row after row.

Slots index the first dimension of the state tensors [num_slots, *shape]. A slot may hold NaN before its first use: a
row whose state has seen no token starts from zeros and must select, not multiply.

The output of a token is read from the state after it. So a row can compute its last position again (`SitOut` in
step.py), with the state that has seen that token: the token then has no decay and no update. Only the first token of a
row can be seen.

With drafts, the state in a slot may be older than its row: it has seen the tokens before the row's *base*. The inputs
of the tokens from there on are in rings, by position. A step first replays them up to the row's first position. A row
without drafts then computes its tokens, and its state moves on to its end. A row with drafts leaves the state in front
of its first token and only adds inputs to the rings: which drafts are accepted is known after the step. So taking a
rejected draft back moves a position and copies nothing, and a step reads and writes each state once. A row that
computes its last position again had drafts, so that its state is still in front of it, or had none, so that its base is
one more than the first position: then the state has seen the token, and stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.contracts.cache_spec import STATE_CHUNK


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """The rows of a step in an engine with drafts. In a step of one token per row, a row with drafts has several
    adjacent draws, which are rows of `RecurrentSteps`; only its first draw replays and changes the state."""

    bases: torch.Tensor  # [B] int32: positions that the state in the row's slot has seen; 0: the row starts from zeros
    offsets: torch.Tensor  # [B] int32: index of the draw within its row
    counts: torch.Tensor  # [B] int32: draws of the row, at its first draw; 0 at the others
    # [B] int32: slot to store the state after so many positions to, -1: none. The state passes this position in the
    # replay, or as a row without drafts in a step of one token per row. Saves in longer chunks are in `chunks`.
    save_slots: torch.Tensor
    save_positions: torch.Tensor  # [B] int32
    # host: upper bound of the tokens that a row replays; and the offsets, None: not known on the host
    max_replays: int
    host_offsets: NDArray[np.int32] | None

    @property
    def is_plain(self) -> bool:
        """Host: whether no row has drafts or replays tokens."""
        return not self.max_replays and self.host_offsets is not None and not self.host_offsets.any()

    def may_begin(self, index: int) -> bool:
        """Host: whether this may be the first draw of a row."""
        return self.host_offsets is None or not self.host_offsets[index]


@dataclass(frozen=True, slots=True)
class RecurrentSteps:
    slots: torch.Tensor  # [B] int32: the row's state slot, which is its row number; of padding rows the padding row
    starts: torch.Tensor  # [B + 1] int32: first token of each row; padding rows have no tokens unless `is_single`
    first_positions: torch.Tensor  # [B] int32: position of the row's first token
    # [B] int32: positions that the state in the row's slot has seen, with drafts after the replay; 0: the row starts
    # from zeros. Kernels that defer stores keep the updates from there to the first position. One more than the first
    # position: the state has seen the row's first token.
    seen_positions: torch.Tensor
    num_tokens: NDArray[np.int32]  # host [B]: tokens of each row; of no meaning if the step is padded for a graph
    is_single: bool  # host: every row has one token

    # The following two are None if `is_single`.
    # [N, 4] int32: (row index, first token, number of tokens, slot to store the state after the chunk to, or -1), the
    # chunks of a row in order, row after row. N is `max_chunks`; unused entries are at the end, with row index -1.
    chunks: torch.Tensor | None = None
    chunk_starts: torch.Tensor | None = None  # [B + 1] int32: first entry of each row in `chunks`

    # [B] int32, only if `is_single`: slot to store the new state to too, or -1. With `drafts` those of `drafts` count.
    save_slots: torch.Tensor | None = None
    drafts: DraftSteps | None = None  # None: the engine has no drafts

    def covers(self, num_tokens: int) -> bool:
        """Host: whether each of the step's tokens belongs to a row, and the counts are exact. False if the step is
        padded with tokens of no row."""
        return self.is_single or int(self.num_tokens.sum()) == num_tokens

    @property
    def is_verified(self) -> bool:
        """Host: whether this is a step of one token per row in which rows may have drafts or replay tokens."""
        return self.is_single and self.drafts is not None and not self.drafts.is_plain


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """Upper bound of the chunks of a step. A row of n >= 2 tokens has at most (n - 2) // STATE_CHUNK + 2 chunks."""
    return min(num_tokens, (num_tokens + num_rows * (2 * STATE_CHUNK - 2)) // STATE_CHUNK)
