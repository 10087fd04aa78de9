"""RecurrentSteps made by hand, from rows, saves and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from slipstream.cache_spec import STATE_CHUNK
from slipstream.ops.recurrent_steps import RecurrentSteps, max_chunks


class StepRow(NamedTuple):
    slot: int
    first: int  # position of its first token in this step
    count: int
    saves: dict[int, int] = {}  # position to slot: the state after position - 1


def hand_steps(
    rows: Sequence[StepRow],
    padding: int = 0,
    padding_slot: int = 0,
    num_tokens: int = 0,
    device: torch.device | str = "cpu",
    chunked: bool = False,
) -> RecurrentSteps:
    """`padding`: rows that are added, with one token each if all rows have one, else with none. `num_tokens`: tokens
    that the step is padded to. `chunked`: chunks even if all rows have one token."""
    is_single = all(row.count == 1 for row in rows) and not chunked and num_tokens <= len(rows) + padding
    extra = [StepRow(padding_slot, 0, 1 if is_single else 0)] * padding
    everyone = [*rows, *extra]
    counts = [row.count for row in everyone]
    starts = np.cumsum([0, *counts])
    chunks, chunk_starts = [], [0]
    for number, row in enumerate(everyone):
        position, end = row.first, row.first + row.count
        while position < end:
            border = min((position // STATE_CHUNK + 1) * STATE_CHUNK, end)
            token = starts[number] + position - row.first
            chunks.append((number, token, border - position, row.saves.get(border, -1)))
            position = border
        chunk_starts.append(len(chunks))
    table = np.full((max_chunks(max(int(starts[-1]), num_tokens), len(everyone)), 4), -1)
    table[: len(chunks)] = chunks
    saves = [row.saves.get(row.first + 1, -1) for row in everyone]

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

    return RecurrentSteps(
        slots=tensor([row.slot for row in everyone]),
        starts=tensor(starts),
        first_positions=tensor([row.first for row in everyone]),
        num_tokens=np.array(counts, np.int32),
        is_single=is_single,
        chunks=None if is_single else tensor(table),
        chunk_starts=None if is_single else tensor(chunk_starts),
        save_slots=tensor(saves) if is_single else None,
    )
