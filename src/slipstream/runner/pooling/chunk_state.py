"""ChunkState: what is kept between the steps of a prompt that is computed in several chunks.

LAST needs nothing. FIRST keeps one hidden state, MEAN a running sum, the weighted mean a weighted sum, MAX a running
maximum: one buffer of each kind, with a vector per row. Results of all tokens keep their hidden states, in a buffer of
the prompt's size. A prompt that is computed in one step keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from slipstream.checkpoint.pooling_info import Method, Reduction, reductions_of
from slipstream.contracts.step import PoolAdmission, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import BatchView
from slipstream.runner.batch.staging import Upload
from slipstream.runner.pooling.methods import TakeHidden, begins_of, combine, finish_vectors, reduce_rows, starts_of
from slipstream.runner.pooling.pooled_rows import PooledRow, skipped_in_step

PoolWork = Callable[[BatchView, torch.Tensor], torch.Tensor]


class TokenParts:
    """Hidden states of a prompt's tokens so far. Only device work accesses the tensor."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.count = 0  # host: number of tokens after all launched steps
        self._hidden: torch.Tensor | None = None

    def prepare(self, count: int, take: TakeHidden | None) -> TakeHidden:
        """Host: add `count` tokens of this step. The returned work appends their hidden states and returns all."""
        start, stop = self.count, self.count + count
        self.count = stop

        def add(hidden: torch.Tensor) -> torch.Tensor:
            if self._hidden is None:
                self._hidden = hidden.new_empty(self.max_tokens, hidden.shape[1])
            if take is not None:
                self._hidden[start:stop].copy_(take(hidden))
            return self._hidden[:stop]

        return add


class ChunkState:
    """A `RowState`: admissions add rows, releases remove them."""

    def __init__(
        self, methods: tuple[Method, ...], num_rows: int, hidden_size: int, dtype: torch.dtype, device: Device
    ) -> None:
        self.methods = methods
        self.admissions: dict[int, PoolAdmission] = {}  # by row: running pooling requests
        self.parts: dict[int, TokenParts] = {}  # by row: prompts in several steps that need all tokens
        dtype = torch.promote_types(dtype, torch.float32)
        # [rows, hidden] each: the reduction of the row's tokens so far
        self.reduced: dict[Reduction, torch.Tensor] = {
            kind: torch.zeros(num_rows, hidden_size, dtype=dtype, device=device.torch_device)
            for kind in reductions_of(methods)
        }

    def apply(self, plan: StepPlan) -> None:
        if self.admissions:
            for row in plan.released.tolist():
                self.admissions.pop(row, None)
                self.parts.pop(row, None)
        if plan.pooling is not None:
            self.admissions.update({admission.row: admission for admission in plan.pooling.admitted})

    def part_of(self, row: int) -> TokenParts:
        """Host: the parts of a prompt that does not end with this step, or began before it."""
        if row not in self.parts:
            self.parts[row] = TokenParts(self.admissions[row].num_prompt_tokens)
        return self.parts[row]

    def flush(self, upload: Upload) -> None:
        """Nothing to upload: each step uploads what it needs when it is prepared."""

    def pool_vectors(self, rows: Sequence[PooledRow], upload: Upload) -> PoolWork:
        """Host: pool rows of which some began before this step or continue after it. The returned work computes a
        vector for each prompt that ends."""
        ending = [row for row in rows if row.ends]
        first = [self._first_of(row) for row in rows]
        indices_rows = [[m.index for m in rows], [m.row for m in rows]]
        values = upload.put(np.array([*indices_rows, np.maximum(first, 0)], np.int64))
        flags = upload.put(np.array([[m.has_begun for m in rows], [at >= 0 for at in first]], np.bool_))
        last = upload.put(np.flatnonzero([row.ends for row in rows]))
        ends = upload.put(np.array([m.start + len(m.tokens) - 1 for m in ending], np.int64))
        skips_now = skipped_in_step(rows, upload)
        skips = None
        if any(row.mode.skip for row in ending):
            skips = upload.put(np.array([row.mode.skip for row in ending], np.int64))
        methods, reduced = self.methods, self.reduced

        def pool(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
            indices, rows, firsts = upload.tensor(values).unbind(0)
            began, has_first = upload.tensor(flags).unsqueeze(2).unbind(0)
            starts = starts_of(view, hidden)
            begins = None if skips_now is None else begins_of(starts, upload.tensor(skips_now))
            whole: dict[Reduction, torch.Tensor] = {}
            for kind, table in reduced.items():
                before = table.index_select(0, rows)
                if kind == "first":
                    now = torch.where(has_first, hidden.index_select(0, firsts).to(table.dtype), before)
                else:
                    now = reduce_rows(kind, view, hidden, starts, begins).index_select(0, indices)
                    now = torch.where(began, combine(kind, before, now), now)
                table.index_copy_(0, rows, now)
                whole[kind] = now.index_select(0, upload.tensor(last))
            of_last = hidden.index_select(0, upload.tensor(ends)) if "last" in methods else None
            lengths = view.lengths.index_select(0, indices.index_select(0, upload.tensor(last)))
            return finish_vectors(methods, whole, of_last, lengths, None if skips is None else upload.tensor(skips))

        return pool

    def _first_of(self, row: PooledRow) -> int:
        """Index in the step of the prompt's first pooled token; -1: it is in another step. If all tokens are skipped,
        the first token."""
        skip, begin = row.mode.skip, row.length - len(row.tokens)
        length = row.length if row.ends else self.admissions[row.row].num_prompt_tokens
        position = skip if skip < length else 0
        return row.start + position - begin if begin <= position < row.length else -1
