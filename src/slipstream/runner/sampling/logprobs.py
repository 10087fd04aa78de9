"""Logprobs of the raw logits, before any stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.config.memory import SCORED_AT_ONCE
from slipstream.device.device import Device
from slipstream.ops.sample import TopLogprobs, logprobs_of, top_logprobs
from slipstream.params import MAX_PACKED_LOGPROBS
from slipstream.runner.batch.staging import Upload
from slipstream.runner.sampling.entry_allocator import EntryAllocator
from slipstream.runner.sampling.entry_tables import ListTable
from slipstream.step import Ints, PromptScores, StepPlan


@dataclass(frozen=True, slots=True)
class LogprobsWork:
    """Reports the drawn token's logprob and rank, and the k likeliest tokens."""

    k: int
    edited: bool  # whether a stage changes the logits before the draw

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Device, before the stages: the logits that `compute` needs."""
        return logits.clone() if self.edited else logits

    def compute(self, raw: torch.Tensor, tokens: torch.Tensor) -> TopLogprobs:
        """Device, after the draw."""
        return top_logprobs(raw, tokens, self.k)


@dataclass(frozen=True, slots=True)
class RequestedLogprobsWork:
    """Reports the logprobs of requested ids in one step."""

    shape: tuple[int, int]  # number of rows with requested ids, and the maximum number of ids
    compute: Callable[[torch.Tensor], torch.Tensor]  # device: raw logits [S, V] to logprobs of that shape


class RequestedLogprobs:
    """logprob_token_ids: keeps the requested ids of rows on the device. A RowState that edits no logits."""

    def __init__(self, num_rows: int, device: Device, max_ids: int) -> None:
        self.entries = EntryAllocator(num_rows)
        self.ids = ListTable(self.entries, 1, torch.int32, device, max_ids, fill=0)
        self._new: list[tuple[int, tuple[int, ...]]] = []

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.ids.free(row)
        for admission in plan.admitted:
            if ids := admission.params.requested_ids:
                self.ids.assign(admission.row, len(ids))
                self._new.append((admission.row, ids))

    def flush(self, upload: Upload) -> None:
        if self._new:
            self.ids.make_room(upload)
        for row, ids in self._new:
            self._write(int(self.entries.of_row[row]), ids, upload)
        self._new = []

    def _write(self, entry: int, ids: tuple[int, ...], upload: Upload) -> None:
        table, span, num = self.ids, upload.put(np.array(ids, np.int32)), len(ids)

        def write() -> None:
            table.tensor[entry].zero_()[:num].copy_(upload.tensor(span))

        upload.then(write)

    def prepare(self, rows: Ints, upload: Upload) -> RequestedLogprobsWork | None:
        users = self.entries.users(rows, upload)
        if users is None:
            return None
        table, width = self.ids, int(self.ids.sizes[users.rows].max())

        def compute(raw: torch.Tensor) -> torch.Tensor:
            ids = table.tensor[:, :width].index_select(0, upload.tensor(users.entries))
            return logprobs_of(raw.index_select(0, upload.tensor(users.index)), ids.long())

        return RequestedLogprobsWork((len(users.rows), width), compute)


@dataclass(frozen=True, slots=True)
class WideLogprobsWork:
    """Reports the wide rows of one step."""

    shape: tuple[int, int]  # number of wide rows, and the maximum number of likeliest tokens
    compute: Callable[[torch.Tensor, torch.Tensor], TopLogprobs]  # device: raw logits and tokens of all rows


class WideLogprobs:
    """Rows that request more than MAX_PACKED_LOGPROBS likeliest tokens. A RowState without device memory."""

    def __init__(self, num_rows: int) -> None:
        self._wanted = np.zeros(num_rows, np.int64)
        self._num = 0  # number of such rows

    def apply(self, plan: StepPlan) -> None:
        self._wanted[plan.released] = 0
        for admission in plan.admitted:
            num = admission.params.num_logprobs or 0
            self._wanted[admission.row] = num if num > MAX_PACKED_LOGPROBS else 0
        self._num = int(np.count_nonzero(self._wanted))

    def flush(self, upload: Upload) -> None:
        pass

    def is_used_by(self, rows: Ints) -> bool:
        """Host: whether any of these rows is wide."""
        return self._num > 0 and bool(self._wanted[rows].any())

    def prepare(self, rows: Ints, upload: Upload) -> WideLogprobsWork | None:
        if not self.is_used_by(rows):
            return None
        wanted = self._wanted[rows]
        which = np.flatnonzero(wanted)
        span, width = upload.put(which), int(wanted.max())

        def compute(raw: torch.Tensor, tokens: torch.Tensor) -> TopLogprobs:
            index = upload.tensor(span)
            return top_logprobs(raw.index_select(0, index), tokens.index_select(0, index), width)

        return WideLogprobsWork((len(which), width), compute)


def prepare_scores(
    scores: PromptScores, logits_of: Callable[[torch.Tensor, int], torch.Tensor], upload: Upload
) -> Callable[[torch.Tensor], TopLogprobs]:
    """Host: the work that computes logprobs of prompt tokens from a step's hidden states [T, hidden]. `logits_of` gets
    the hidden states of SCORED_AT_ONCE scored positions, and the number of this part."""
    index_span, token_span = upload.put(scores.indices.astype(np.int64)), upload.put(scores.tokens.astype(np.int64))
    k = scores.num_logprobs

    def score(hidden: torch.Tensor) -> TopLogprobs:
        indices, tokens = upload.tensor(index_span), upload.tensor(token_span)
        parts = [
            top_logprobs(logits_of(hidden.index_select(0, some), number), own, k)
            for number, (some, own) in enumerate(
                zip(indices.split(SCORED_AT_ONCE), tokens.split(SCORED_AT_ONCE), strict=True)
            )
        ]
        return TopLogprobs(*map(torch.cat, zip(*parts, strict=True)))

    return score
