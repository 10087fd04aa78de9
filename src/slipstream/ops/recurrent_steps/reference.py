"""The chunks of a step in plain torch. B rows, N entries."""

from __future__ import annotations

import torch

from slipstream.cache_spec import STATE_CHUNK


def list_chunks(
    starts: torch.Tensor,  # [B + 1] int32, first token of each row
    first_positions: torch.Tensor,  # [B] int32, position of each row's first token
    saves: torch.Tensor | None,  # [S, 3] int32 (row index, position, slot), row index -1: unused; None: no saves
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
        slots.index_copy_(0, torch.where(saves[:, 0] >= 0, entry, num_entries).long(), saves[:, 2])
    columns = (
        torch.where(is_used, owner, -1),
        torch.where(is_used, starts[row] + begin - first_positions[row], 0),
        torch.where(is_used, end - begin, 0),
        slots[:num_entries],
    )
    return torch.stack(columns, 1), chunk_starts
