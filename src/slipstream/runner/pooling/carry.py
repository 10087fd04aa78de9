"""Carry: what a prompt that takes several steps leaves for the step that ends it.

LAST needs nothing. FIRST keeps a line and MEAN a running sum, a line of one buffer for each row. What needs all tokens
keeps their hidden states in a buffer of the prompt's size. A prompt that is computed in one step keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slipstream.config.pooling_info import Method
from slipstream.device.device import Device
from slipstream.nn.context import BatchView
from slipstream.runner.batch.staging import Upload
from slipstream.runner.pooling.methods import Lines, sums_of
from slipstream.step import Ints, PoolAdmission, StepPlan

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


class Carry:
    """A `RowState`: rows come with admissions and go with releases."""

    def __init__(self, method: Method, num_rows: int, hidden_size: int, dtype: torch.dtype, device: Device) -> None:
        self.method = method
        self.admissions: dict[int, PoolAdmission] = {}  # of rows that are here
        self.parts: dict[int, Part] = {}  # of those that began and need all tokens
        keeps = method in ("first", "mean")
        dtype = torch.promote_types(dtype, torch.float32)
        # [rows, hidden] a line or a sum
        self.kept = torch.zeros(num_rows if keeps else 0, hidden_size, dtype=dtype, device=device.torch_device)

    def apply(self, plan: StepPlan) -> None:
        if self.admissions:
            for row in plan.released.tolist():
                self.admissions.pop(row, None)
                self.parts.pop(row, None)
        for admission in plan.pool_admitted:
            self.admissions[admission.row] = admission

    def part_of(self, row: int) -> Part:
        """Host: of a prompt that does not end with this step, or began before it."""
        if row not in self.parts:
            self.parts[row] = Part(self.admissions[row].num_prompt_tokens)
        return self.parts[row]

    def flush(self, upload: Upload) -> None:
        """Nothing is sent: each step says what it needs when it is prepared."""

    def pool_lines(
        self,
        rows: Ints,
        places: Ints,
        begun: np.ndarray[Any, np.dtype[np.bool_]],
        ending: np.ndarray[Any, np.dtype[np.bool_]],
        lengths: Ints,
        starts: Ints,
        upload: Upload,
    ) -> Pooled:
        """Host: FIRST or MEAN of rows of which some began before this step or go on after it.

        `places` are theirs in the plan, `starts` their first tokens in the step. Gives a line for each that is ending.
        """
        numbers = upload.put(np.stack([places, rows, starts]).astype(np.int64))
        flags = upload.put(begun[:, None])
        last = upload.put(np.flatnonzero(ending))
        counts = upload.put(lengths[ending].astype(np.int64)[:, None])
        kept, is_mean = self.kept, self.method == "mean"

        def pool(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
            places, rows, starts = upload.tensor(numbers).unbind(0)
            before, began = kept.index_select(0, rows), upload.tensor(flags)
            if is_mean:
                lines = sums_of(view, hidden).index_select(0, places) + torch.where(began, before, 0)
            else:
                lines = torch.where(began, before, hidden.index_select(0, starts).to(kept.dtype))
            kept.index_copy_(0, rows, lines)
            lines = lines.index_select(0, upload.tensor(last))
            return lines / upload.tensor(counts) if is_mean else lines

        return pool
