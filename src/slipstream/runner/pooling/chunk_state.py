"""Carry: what a prompt that takes several steps leaves for the step that ends it.

LAST needs nothing. FIRST keeps a line, MEAN a running sum, the weighted mean a weighted one, MAX the largest numbers:
for each kind one buffer with a line for each row. What needs all tokens keeps their hidden states in a buffer of the
prompt's size. A prompt that is computed in one step keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from slipstream.config.pooling_info import KeptLine, Method, kept_lines
from slipstream.device.device import Device
from slipstream.nn.context import BatchView
from slipstream.runner.batch.staging import Upload
from slipstream.runner.pooling.methods import Lines, begins_of, finish_lines, line_of_rows, starts_of
from slipstream.runner.pooling.pooled_rows import PooledRow, skipped_in_step
from slipstream.step import PoolAdmission, StepPlan

Pooled = Callable[[BatchView, torch.Tensor], torch.Tensor]


class Part:
    """The lines that a prompt's tokens have given so far. The tensor lives on the stream's side."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0  # host: lines promised
        self._lines: torch.Tensor | None = None

    def prepare(self, count: int, take: Lines | None) -> Lines:
        """Host: so many of this step's lines come on top. The closure adds them and gives all."""
        start, stop = self.count, self.count + count
        self.count = stop

        def add(hidden: torch.Tensor) -> torch.Tensor:
            if self._lines is None:
                self._lines = hidden.new_empty(self.most, hidden.shape[1])
            if take is not None:
                self._lines[start:stop].copy_(take(hidden))
            return self._lines[:stop]

        return add


class ChunkState:
    """A `RowState`: rows come with admissions and go with releases."""

    def __init__(
        self, methods: tuple[Method, ...], num_rows: int, hidden_size: int, dtype: torch.dtype, device: Device
    ) -> None:
        self.methods = methods
        self.admissions: dict[int, PoolAdmission] = {}  # of rows that are here
        self.parts: dict[int, Part] = {}  # of those that began and need all tokens
        dtype = torch.promote_types(dtype, torch.float32)
        # [rows, hidden] each: what the tokens of a row have come to so far
        self.kept: dict[KeptLine, torch.Tensor] = {
            kind: torch.zeros(num_rows, hidden_size, dtype=dtype, device=device.torch_device)
            for kind in kept_lines(methods)
        }

    def apply(self, plan: StepPlan) -> None:
        if self.admissions:
            for row in plan.released.tolist():
                self.admissions.pop(row, None)
                self.parts.pop(row, None)
        if plan.pooling is not None:
            self.admissions.update({admission.row: admission for admission in plan.pooling.admitted})

    def part_of(self, row: int) -> Part:
        """Host: of a prompt that does not end with this step, or began before it."""
        if row not in self.parts:
            self.parts[row] = Part(self.admissions[row].num_prompt_tokens)
        return self.parts[row]

    def flush(self, upload: Upload) -> None:
        """Nothing is sent: each step says what it needs when it is prepared."""

    def pool_lines(self, members: Sequence[PooledRow], upload: Upload) -> Pooled:
        """Host: of rows of which some began before this step or go on after it. Gives a line for each that ends."""
        ending = [member for member in members if member.ends]
        first = [self._first_of(member) for member in members]
        places_rows = [[m.place for m in members], [m.row for m in members]]
        numbers = upload.put(np.array([*places_rows, np.maximum(first, 0)], np.int64))
        flags = upload.put(np.array([[m.has_begun for m in members], [at >= 0 for at in first]], np.bool_))
        last = upload.put(np.flatnonzero([member.ends for member in members]))
        ends = upload.put(np.array([m.start + len(m.tokens) - 1 for m in ending], np.int64))
        skips_now = skipped_in_step(members, upload)
        skips = None
        if any(member.setting.skip for member in ending):
            skips = upload.put(np.array([member.setting.skip for member in ending], np.int64))
        methods, kept = self.methods, self.kept

        def pool(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
            places, rows, firsts = upload.tensor(numbers).unbind(0)
            began, has_first = upload.tensor(flags).unsqueeze(2).unbind(0)
            starts = starts_of(view, hidden)
            begins = None if skips_now is None else begins_of(starts, upload.tensor(skips_now))
            whole: dict[KeptLine, torch.Tensor] = {}
            for kind, lines in kept.items():
                before = lines.index_select(0, rows)
                if kind == "first":
                    now = torch.where(has_first, hidden.index_select(0, firsts).to(lines.dtype), before)
                else:
                    now = line_of_rows(kind, view, hidden, starts, begins).index_select(0, places)
                    now = torch.where(began, torch.maximum(before, now) if kind == "max" else before + now, now)
                lines.index_copy_(0, rows, now)
                whole[kind] = now.index_select(0, upload.tensor(last))
            of_last = hidden.index_select(0, upload.tensor(ends)) if "last" in methods else None
            lengths = view.lengths.index_select(0, places.index_select(0, upload.tensor(last)))
            return finish_lines(methods, whole, of_last, lengths, None if skips is None else upload.tensor(skips))

        return pool

    def _first_of(self, member: PooledRow) -> int:
        """Where in the step the prompt's first token is that counts; -1: in another step. Of a prompt that has only
        tokens that do not, it is the first of all."""
        skip, begin = member.setting.skip, member.length - len(member.tokens)
        length = member.length if member.ends else self.admissions[member.row].num_prompt_tokens
        position = skip if skip < length else 0
        return member.start + position - begin if begin <= position < member.length else -1
