"""The chunks of a step, and what states have seen, in plain torch. B rows, N entries, T tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.contracts.cache_spec import STATE_CHUNK


def list_chunks(
    starts: torch.Tensor,  # [B + 1] int32, first token of each row
    first_positions: torch.Tensor,  # [B] int32, position of each row's first token
    # [S, 3] int32 (row index, position, slot), row index -1: unused; None: no saves. Without effect if no chunk of the
    # row ends at the position
    saves: torch.Tensor | None,
    num_entries: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunks` and `chunk_starts` of `RecurrentSteps`."""
    num_tokens = starts.diff()
    first_chunk = first_positions // STATE_CHUNK
    ends = first_positions + num_tokens
    counts = torch.where(num_tokens > 0, (ends - 1) // STATE_CHUNK - first_chunk + 1, 0)
    chunk_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    entries = torch.arange(num_entries, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(chunk_starts[1:], entries, right=True, out_int32=True)
    is_used = owner < len(num_tokens)
    row = owner.clamp(max=len(num_tokens) - 1)
    chunk = first_chunk[row] + entries - chunk_starts[row]
    begin = torch.maximum(chunk * STATE_CHUNK, first_positions[row])
    end = torch.minimum((chunk + 1) * STATE_CHUNK, ends[row])
    # one entry more, which unused saves write to
    slots = torch.full((num_entries + 1,), -1, dtype=torch.int32, device=starts.device)
    if saves is not None:
        row_of_save = saves[:, 0].clamp(min=0)
        entry = chunk_starts[row_of_save] + (saves[:, 1] - 1) // STATE_CHUNK - first_chunk[row_of_save]
        is_inside = (saves[:, 1] > first_positions[row_of_save]) & (saves[:, 1] <= ends[row_of_save])
        slots.index_copy_(0, torch.where((saves[:, 0] >= 0) & is_inside, entry, num_entries).long(), saves[:, 2])
    columns = (
        torch.where(is_used, owner, -1),
        torch.where(is_used, starts[row] + begin - first_positions[row], 0),
        torch.where(is_used, end - begin, 0),
        slots[:num_entries],
    )
    return torch.stack(columns, 1), chunk_starts


class RowPositions(NamedTuple):
    """Fields of `RecurrentSteps`."""

    slots: torch.Tensor
    first_positions: torch.Tensor
    seen_positions: torch.Tensor


def advance_seen_(
    table: torch.Tensor,  # [rows] int32, positions that the stored state of each row has seen; the last row is padding
    rows: torch.Tensor,  # [B] int64
    starts: torch.Tensor,  # [B + 1] int32, first token of each row
    positions: torch.Tensor,  # [B] int64, of the first token of each row
    period: int,  # steps of one token per row store states at multiples of it
    is_single: bool,
) -> RowPositions:
    """The rows of a step in an engine without drafts. `table` becomes what it is after the step."""
    seen, firsts = table.index_select(0, rows), positions.to(torch.int32)
    ends = firsts + starts.diff()
    after = torch.maximum(seen, ends // period * period if is_single else ends)
    table.index_copy_(0, rows, torch.where(rows == len(table) - 1, 0, after))
    return RowPositions(rows.to(torch.int32), firsts, seen)


def seen_tokens(steps: RecurrentSteps, num_tokens: int) -> torch.Tensor:
    """[T] bool: tokens that the states of their rows have seen."""
    is_seen = steps.seen_positions > steps.first_positions
    if steps.is_single:
        return is_seen
    tokens = torch.arange(num_tokens, device=is_seen.device)
    rows = torch.searchsorted(steps.starts[1:], tokens, right=True).clamp(max=len(is_seen) - 1)
    return is_seen[rows] & (tokens == steps.starts[rows])


class Bases(NamedTuple):
    """Fields of `DraftSteps`."""

    bases: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    save_slots: torch.Tensor
    save_positions: torch.Tensor


def advance_bases_(
    table: torch.Tensor,  # [rows] int32, positions that the state of each row has seen; the last row is for padding
    rows: torch.Tensor,  # [B] int64
    starts: torch.Tensor,  # [B + 1] int32, first token of each row
    positions: torch.Tensor,  # [B] int64, of the first token of each row
    offsets: torch.Tensor | None,  # [B] int64, index of the draw within its row; None: no row has drafts
    saves: torch.Tensor,  # [B, 2] int32: slot to save the row's state to, or -1, and the position
    is_single: bool,
) -> tuple[Bases, RowPositions]:
    """The rows of a step in an engine with drafts. `table` becomes what it is after the step. A save counts only if the
    state passes its position in this step, or with longer chunks in its replay."""
    bases, firsts = table.index_select(0, rows), positions.to(torch.int32)
    indices = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    offsets = torch.zeros_like(indices) if offsets is None else offsets.to(torch.int32)
    # first draws of rows at or after each index, from the end; the next one begins the next row
    following = torch.where(offsets == 0, indices, len(rows)).flip(0).cummin(0).values.flip(0)
    following = torch.cat([following[1:], following.new_full((1,), len(rows))])
    counts = torch.where(offsets == 0, following - indices, 0).to(torch.int32)
    after = torch.where(counts == 1, firsts + starts.diff(), firsts - offsets)
    after = torch.maximum(bases, after)  # a state that has seen the row's first token stays behind it
    slot, position = saves.unbind(1)
    limit = after if is_single else firsts
    is_passed = (offsets == 0) & (bases < position) & (position <= limit)
    table.index_copy_(0, rows, torch.where(rows == len(table) - 1, 0, after))
    made = Bases(bases, offsets, counts, torch.where(is_passed, slot, -1), position)
    return made, RowPositions(rows.to(torch.int32), firsts, torch.maximum(bases, firsts))


# RecurrentSteps: what recurrent ops need to know of a step's rows. Made once per step; all layers reuse it.
#
# The row of a step computes positions [p, p + n). Kernels cut them into chunks at multiples of STATE_CHUNK, counted
# from position 0, so that chunks hardly depend on how the scheduler cuts a prompt. B rows, T tokens, packed row after
# row.
#
# Slots index the first dimension of the state tensors [num_slots, *shape]. A slot may hold NaN before its first use: a
# row whose state has seen no token starts from zeros and must select, not multiply.
#
# The output of a token is read from the state after it. So a row can compute its last position again (`SitOut` in
# step.py), with the state that has seen that token: the token then has no decay and no update. Only the first token of
# a row can be seen.
#
# With drafts, the state in a slot may be older than its row: it has seen the tokens before the row's *base*. The inputs
# of the tokens from there on are in rings, by position. A step first replays them up to the row's first position. A row
# without drafts then computes its tokens, and its state moves on to its end. A row with drafts leaves the state in
# front of its first token and only adds inputs to the rings: which drafts are accepted is known after the step. So
# taking a rejected draft back moves a position and copies nothing, and a step reads and writes each state once. A row
# that computes its last position again had drafts, so that its state is still in front of it, or had none, so that its
# base is one more than the first position: then the state has seen the token, and stays where it is.


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
    def rows(self) -> tuple[torch.Tensor | None, ...]:
        """Tables by row for kernels of one token per row, [B] each: slots, first and seen positions, slots of saves."""
        return self.slots, self.first_positions, self.seen_positions, self.save_slots

    @property
    def drafted_rows(self) -> tuple[torch.Tensor, ...]:
        """The same with drafts: slots, first positions, bases, counts, and slots and positions of saves."""
        drafts = self.drafts
        assert drafts is not None
        saves = drafts.save_slots, drafts.save_positions
        return self.slots, self.first_positions, drafts.bases, drafts.counts, *saves

    @property
    def is_verified(self) -> bool:
        """Host: whether this is a step of one token per row in which rows may have drafts or replay tokens."""
        return self.is_single and self.drafts is not None and not self.drafts.is_plain


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """Upper bound of the chunks of a step. A row of n >= 2 tokens has at most (n - 2) // STATE_CHUNK + 2 chunks."""
    return min(num_tokens, (num_tokens + num_rows * (2 * STATE_CHUNK - 2)) // STATE_CHUNK)
