"""The chunks of a step on CUDA, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.cache_spec import STATE_CHUNK

_ENTRIES = 32  # of one program
_SAVES = 64  # of one turn


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
