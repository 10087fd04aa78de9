"""RecurrentSteps made by hand, from rows, saves and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.recurrent import RecurrentSteps, max_chunks


class StepRow(NamedTuple):
    slot: int
    first: int  # position of its first token in this step
    count: int
    saves: dict[int, int] = {}  # position to slot: the state after position - 1
    seen: int | None = None  # positions that the state in its slot has seen; None: those before `first`


Spans = dict[int, tuple[int, int]]
"""By slot: the row's first position in a step, and its number of tokens."""

REPEATING_STEPS: list[Spans] = [
    {3: (0, 1), 4: (0, 1)},
    {3: (0, 1), 4: (1, 1), 6: (0, 1)},  # row 3 computes its first position again
    {3: (1, 1), 4: (2, 5), 6: (0, 1), 5: (0, 61)},
    {3: (1, 1), 4: (6, 1), 6: (0, 1), 5: (60, 1)},  # after a step of several tokens, 6 for the third time
    {3: (2, 1), 4: (7, 1), 6: (1, 1), 5: (61, 1)},
    {3: (3, 1), 4: (7, 1), 6: (2, 1), 5: (62, 1)},  # row 4 the last position of a period
    {3: (3, 1), 4: (7, 1), 6: (2, 1), 5: (63, 1)},  # and row 6 another
    {3: (3, 1), 4: (8, 2), 6: (2, 1), 5: (63, 1)},  # the same beside a row of several tokens
    {3: (4, 1), 4: (9, 3), 6: (3, 1), 5: (64, 1)},  # the first of several tokens
    {3: (5, 1), 4: (11, 1), 6: (0, 1), 5: (65, 1)},  # another request has row 6
    {3: (6, 1), 4: (12, 1), 6: (1, 1), 5: (65, 62)},
    {3: (7, 1), 5: (126, 4)},
]
"""Steps in which some rows compute their last position again."""


class SeenPositions:
    """What the stored state of each slot has seen, step by step. `period`: steps of one token per row store states at
    multiples of it."""

    def __init__(self, period: int = 1) -> None:
        self.period = period
        self._seen: dict[int, int] = {}

    def rows(self, spans: Spans, saves: dict[int, dict[int, int]]) -> list[StepRow]:
        is_single = all(count == 1 for _, count in spans.values())
        rows = []
        for slot, (first, count) in spans.items():
            seen, end = self._seen.get(slot, 0), first + count
            seen = 0 if not first and seen > 1 else seen  # another request
            rows.append(StepRow(slot, first, count, saves.get(slot, {}), seen))
            self._seen[slot] = max(seen, end // self.period * self.period if is_single else end)
        return rows


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
        seen_positions=tensor([row.first if row.seen is None else row.seen for row in everyone]),
        num_tokens=np.array(counts, np.int32),
        is_single=is_single,
        chunks=None if is_single else tensor(table),
        chunk_starts=None if is_single else tensor(chunk_starts),
        save_slots=tensor(saves) if is_single else None,
    )
