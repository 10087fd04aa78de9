"""The chunks of a step, and what states have seen, in plain torch. B rows, N entries, T tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.recurrent_steps.steps import RecurrentSteps


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
