"""The chunks of a step, and the positions of its rows, on CUDA, in one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.platform.dispatch import multiprocessors
from slipstream.ops.recurrent.steps import Bases, RecurrentSteps, RowPositions

_ENTRIES = 32  # of one program
_SAVES = 64  # of one turn
_DRAWS = 128  # of one program
_TOKENS = 8  # of one program


def empty_outputs(shape: tuple[int, ...], like: torch.Tensor, steps: RecurrentSteps) -> torch.Tensor:
    """Outputs [tokens, ...] without values, but zeros for the tokens of no row, which are the last."""
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    if shape[0] and not steps.covers(shape[0]):
        _clear_kernel[(triton.cdiv(shape[0], _TOKENS),)](
            out,
            steps.starts,
            shape[0],
            len(steps.slots),
            out[0].numel(),
            TOKENS=_TOKENS,
            BLOCK=1024,
            num_warps=4,
        )
    return out


# grid: (blocks of tokens,)
@triton.jit(do_not_specialize=["num_tokens", "num_rows"], do_not_specialize_on_alignment=["starts"])
def _clear_kernel(out, starts, num_tokens, num_rows, size, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    end = tl.load(starts + num_rows)
    first = tl.program_id(0) * TOKENS
    if first + TOKENS <= end:
        return
    token = first + tl.arange(0, TOKENS)
    for begin in range(0, size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = ((token >= end) & (token < num_tokens))[:, None] & (column < size)[None, :]
        zeros = tl.zeros((TOKENS, BLOCK), out.dtype.element_ty)
        tl.store(out + token.to(tl.int64)[:, None] * size + column[None, :], zeros, mask=mask)


def row_programs(num_rows: int, num_others: int, device: torch.device) -> int:
    """Programs that take turns in the rows of a step, if `num_others` are needed for each row: more than run at once.
    A captured step has room for more rows than it has, and a program for each would have to start to find none."""
    return min(num_rows, triton.cdiv(4 * multiprocessors(device), num_others))


def list_chunks(
    starts: torch.Tensor, first_positions: torch.Tensor, saves: torch.Tensor | None, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, which describes the arguments."""
    num_rows = len(first_positions)
    chunks = torch.empty((num_entries, 4), dtype=torch.int32, device=starts.device)
    chunk_starts = torch.empty(num_rows + 1, dtype=torch.int32, device=starts.device)
    _list_kernel[(triton.cdiv(num_entries, _ENTRIES),)](
        starts,
        first_positions,
        saves,
        chunks,
        chunk_starts,
        num_rows,
        num_entries,
        0 if saves is None else len(saves),
        CHUNK=STATE_CHUNK,
        ROWS=triton.next_power_of_2(num_rows),
        ENTRIES=_ENTRIES,
        SAVES=_SAVES,
        num_warps=4,
    )
    return chunks, chunk_starts


# grid: (blocks of entries,); every program computes all rows' numbers of chunks, which is cheaper than a second launch
@triton.jit(
    do_not_specialize=["num_rows", "num_entries", "num_saves"],
    do_not_specialize_on_alignment=["starts", "first_positions", "saves"],
)
def _list_kernel(
    starts,
    first_positions,
    saves,
    chunks,
    chunk_starts,
    num_rows,
    num_entries,
    num_saves,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SAVES: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    start = tl.load(starts + row, mask=is_row, other=0)
    num_tokens = tl.load(starts + row + 1, mask=is_row, other=0) - start
    first = tl.load(first_positions + row, mask=is_row, other=0)
    last = first + num_tokens - 1
    count = tl.where(num_tokens > 0, last // CHUNK - first // CHUNK + 1, 0)
    end = tl.cumsum(count, 0)  # the entry after the row's last
    if program == 0:
        tl.store(chunk_starts + row + 1, end, mask=is_row)
        tl.store(chunk_starts, 0)

    entry = program * ENTRIES + tl.arange(0, ENTRIES)
    # the row whose entries include this one: as many rows end before it
    owner = tl.sum((end[None, :] <= entry[:, None]).to(tl.int32), 1)
    owns = row[None, :] == owner[:, None]
    is_used = owner < num_rows
    own_first = tl.sum(tl.where(owns, first[None, :], 0), 1)
    own_last = tl.sum(tl.where(owns, last[None, :], 0), 1)
    own_start = tl.sum(tl.where(owns, start[None, :], 0), 1)
    own_entry = tl.sum(tl.where(owns, (end - count)[None, :], 0), 1)
    chunk = own_first // CHUNK + entry - own_entry
    begin = tl.maximum(chunk * CHUNK, own_first)
    stop = tl.minimum((chunk + 1) * CHUNK, own_last + 1)
    slot = tl.full((ENTRIES,), -1, tl.int32)
    if saves is not None:
        for turn in range(0, num_saves, SAVES):
            save = turn + tl.arange(0, SAVES)
            is_save = save < num_saves
            of_row = tl.load(saves + save * 3, mask=is_save, other=-1)
            position = tl.load(saves + save * 3 + 1, mask=is_save, other=-1)
            target = tl.load(saves + save * 3 + 2, mask=is_save, other=-1)
            fits = (of_row[None, :] == owner[:, None]) & (position[None, :] == stop[:, None]) & is_used[:, None]
            slot = tl.maximum(slot, tl.max(tl.where(fits, target[None, :], -1), 1))
    mask = entry < num_entries
    tl.store(chunks + entry * 4, tl.where(is_used, owner, -1), mask=mask)
    tl.store(chunks + entry * 4 + 1, tl.where(is_used, own_start + begin - own_first, 0), mask=mask)
    tl.store(chunks + entry * 4 + 2, tl.where(is_used, stop - begin, 0), mask=mask)
    tl.store(chunks + entry * 4 + 3, slot, mask=mask)


def advance_seen_(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    period: int,
    is_single: bool,
) -> RowPositions:
    """As the reference, which describes the arguments."""
    assert table.is_contiguous()
    made = _empty_positions(rows)
    _seen_kernel[(triton.cdiv(len(rows), _DRAWS),)](
        table,
        rows,
        starts,
        positions,
        *made,
        len(rows),
        len(table) - 1,
        PERIOD=period if is_single else 1,
        ROWS=_DRAWS,
        num_warps=4,
    )
    return made


def _empty_positions(rows: torch.Tensor) -> RowPositions:
    return RowPositions(*(torch.empty(len(rows), dtype=torch.int32, device=rows.device) for _ in RowPositions._fields))


# grid: (blocks of rows,)
@triton.jit(do_not_specialize=["num", "padding"], do_not_specialize_on_alignment=["rows", "starts", "positions"])
def _seen_kernel(
    table,
    rows,
    starts,
    positions,
    slots,
    first_positions,
    seen_positions,
    num,
    padding,
    PERIOD: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = index < num
    row = tl.load(rows + index, mask=mask, other=0)
    before = tl.load(table + row, mask=mask, other=0)
    num_tokens = tl.load(starts + index + 1, mask=mask, other=0) - tl.load(starts + index, mask=mask, other=0)
    first = tl.load(positions + index, mask=mask, other=0).to(tl.int32)
    end = first + num_tokens
    tl.store(slots + index, row.to(tl.int32), mask=mask)
    tl.store(first_positions + index, first, mask=mask)
    tl.store(seen_positions + index, before, mask=mask)
    # of padding rows, which may be several, all read and write 0
    tl.store(table + row, tl.where(row == padding, 0, tl.maximum(before, end // PERIOD * PERIOD)), mask=mask)


def advance_bases_(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor | None,
    saves: torch.Tensor,
    is_single: bool,
) -> tuple[Bases, RowPositions]:
    """As the reference, which describes the arguments; but only first draws have a base."""
    num = len(rows)
    assert table.is_contiguous() and saves.is_contiguous()
    out = torch.empty((len(Bases._fields), num), dtype=torch.int32, device=table.device)
    made = _empty_positions(rows)
    _bases_kernel[(triton.cdiv(num, _DRAWS),)](
        table,
        rows,
        starts,
        positions,
        offsets,
        saves,
        out,
        *made,
        num,
        len(table) - 1,
        SINGLE=is_single,
        DRAWS=_DRAWS,
        num_warps=4,
    )
    return Bases(*out.unbind(0)), made


# grid: (blocks of draws,)
@triton.jit(
    do_not_specialize=["num", "padding"],
    do_not_specialize_on_alignment=["rows", "starts", "positions", "offsets", "saves"],
)
def _bases_kernel(
    table,
    rows,
    starts,
    positions,
    offsets,
    saves,
    out,
    slots,
    first_positions,
    seen_positions,
    num,
    padding,
    SINGLE: tl.constexpr,
    DRAWS: tl.constexpr,
):
    draw = tl.program_id(0) * DRAWS + tl.arange(0, DRAWS)
    mask = draw < num
    row = tl.load(rows + draw, mask=mask, other=0)
    start = tl.load(starts + draw, mask=mask, other=0)
    num_tokens = tl.load(starts + draw + 1, mask=mask, other=0) - start
    first = tl.load(positions + draw, mask=mask, other=0).to(tl.int32)
    offset = tl.zeros((DRAWS,), tl.int32)
    count = tl.full((DRAWS,), 1, tl.int32)
    if offsets is not None:
        offset = tl.load(offsets + draw, mask=mask, other=0).to(tl.int32)
        # draws of one row are adjacent, and their offsets count on
        follows = mask & (offset == 0)
        while tl.max(follows.to(tl.int32), 0) > 0:
            inside = follows & (draw + count < num)
            follows = inside & (tl.load(offsets + draw + count, mask=inside, other=0) == count)
            count += follows.to(tl.int32)
        count = tl.where(offset == 0, count, 0)
    is_first = mask & (offset == 0)
    base = tl.load(table + row, mask=is_first, other=0)
    after = tl.maximum(base, tl.where(count == 1, first + num_tokens, first - offset))
    slot = tl.load(saves + draw * 2, mask=mask, other=-1)
    position = tl.load(saves + draw * 2 + 1, mask=mask, other=0)
    limit = after if SINGLE else first
    is_passed = is_first & (base < position) & (position <= limit)
    tl.store(table + row, tl.where(row == padding, 0, after), mask=is_first)
    tl.store(out + draw, base, mask=mask)
    tl.store(out + num + draw, offset, mask=mask)
    tl.store(out + 2 * num + draw, count, mask=mask)
    tl.store(out + 3 * num + draw, tl.where(is_passed, slot, -1), mask=mask)
    tl.store(out + 4 * num + draw, position, mask=mask)
    tl.store(slots + draw, row.to(tl.int32), mask=mask)
    tl.store(first_positions + draw, first, mask=mask)
    tl.store(seen_positions + draw, tl.maximum(base, first), mask=mask)
