"""Logprobs of generated and prompt tokens.

`logprobs_mode` chooses what is reported: logprobs or logits, before all stages or after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.config.memory import SCORED_AT_ONCE
from slipstream.contracts.step import Ints, PromptScores, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import TopLogprobs, logprobs_of, top_logprobs
from slipstream.params.sampling import MAX_PACKED_LOGPROBS
from slipstream.runner.sampling.stage import EntryAllocator, ListTable
from slipstream.runner.staging import Upload


@dataclass(frozen=True, slots=True)
class ReportedValues:
    """The values of `logprobs_mode`. Prompt logprobs do not depend on it: they are always those of the raw logits."""

    is_processed: bool = False  # of the logits after all stages, as the draw reads them; False: before any stage
    are_logits: bool = False  # logits; False: their log-softmax

    @classmethod
    def of_mode(cls, mode: str) -> ReportedValues:
        return cls(mode.startswith("processed"), mode.endswith("logits"))

    def top(self, logits: torch.Tensor, tokens: torch.Tensor, k: int) -> TopLogprobs:
        """Device: values of `tokens` [R] and of the k likeliest tokens of logits [R, V]."""
        found = top_logprobs(logits, tokens, k)
        if not self.are_logits:
            return found
        chosen, top = logits.gather(1, tokens[:, None]).squeeze(1), logits.gather(1, found.top_ids)
        return found._replace(chosen=chosen.to(found.chosen.dtype), top=top.to(found.top.dtype))

    def at(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Device: values of the ids [R, J] of logits [R, V]."""
        if not self.are_logits:
            return logprobs_of(logits, ids)
        values = logits.gather(1, ids)
        return values if values.dtype is torch.float64 else values.float()


@dataclass(frozen=True, slots=True)
class LogprobsWork:
    """Reports the drawn token's logprob and rank, and the k likeliest tokens."""

    k: int
    edited: bool  # whether a stage changes the logits before the draw
    values: ReportedValues

    def keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Device, before the stages: the tensor that `compute` reads. Stages edit the processed logits in place."""
        return logits.clone() if self.edited and not self.values.is_processed else logits

    def compute(self, logits: torch.Tensor, tokens: torch.Tensor) -> TopLogprobs:
        """Device, after the draw. `logits`: those of `keep`."""
        return self.values.top(logits, tokens, self.k)


@dataclass(frozen=True, slots=True)
class RequestedLogprobsWork:
    """Reports the logprobs of requested ids in one step."""

    shape: tuple[int, int]  # number of rows with requested ids, and the maximum number of ids
    compute: Callable[[torch.Tensor], torch.Tensor]  # device: logits [S, V] to values of that shape


class RequestedLogprobs:
    """logprob_token_ids: keeps the requested ids of rows on the device. A RowState that edits no logits."""

    def __init__(self, num_rows: int, device: Device, max_ids: int, values: ReportedValues) -> None:
        self.values = values
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
        table, width, values = self.ids, int(self.ids.sizes[users.rows].max()), self.values

        def compute(logits: torch.Tensor) -> torch.Tensor:
            ids = table.tensor[:, :width].index_select(0, upload.tensor(users.entries))
            return values.at(logits.index_select(0, upload.tensor(users.index)), ids.long())

        return RequestedLogprobsWork((len(users.rows), width), compute)


@dataclass(frozen=True, slots=True)
class WideLogprobsWork:
    """Reports the wide rows of one step."""

    shape: tuple[int, int]  # number of wide rows, and the maximum number of likeliest tokens
    compute: Callable[[torch.Tensor, torch.Tensor], TopLogprobs]  # device: logits and tokens of all rows


class WideLogprobs:
    """Rows that request more than MAX_PACKED_LOGPROBS likeliest tokens. A RowState without device memory."""

    def __init__(self, num_rows: int, values: ReportedValues) -> None:
        self._values = values
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
        span, width, values = upload.put(which), int(wanted.max()), self._values

        def compute(logits: torch.Tensor, tokens: torch.Tensor) -> TopLogprobs:
            index = upload.tensor(span)
            return values.top(logits.index_select(0, index), tokens.index_select(0, index), width)

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
