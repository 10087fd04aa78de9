"""Logprobs of generated and prompt tokens.

`logprobs_mode` chooses what is reported: logprobs or logits, before all stages or after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from slipstream.config.memory import SCORED_AT_ONCE
from slipstream.contracts.step import Ints, PromptScores, StepPlan
from slipstream.device.device import Device
from slipstream.ops.sampling import TopLogprobs, logprobs_of, top_logprobs
from slipstream.params.sampling import MAX_PACKED_LOGPROBS
from slipstream.runner.sampling.stage import ListTable
from slipstream.runner.staging import Upload

T = TypeVar("T")


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
class SomeRows(Generic[T]):
    """Reports more of some sampling rows of one step."""

    shape: tuple[int, int]  # number of these rows, and the maximum number of values
    # device: from logits and tokens of all sampling rows, and the indices that the step uploaded
    compute: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], T]


Add = Callable[[np.ndarray[Any, np.dtype[np.int64]]], int]
"""Host: adds indices to those that the step uploads. Returns their number."""


class RequestedLogprobs:
    """logprob_token_ids: keeps the requested ids of rows on the device. A RowState that edits no logits."""

    def __init__(self, num_rows: int, device: Device, max_ids: int, values: ReportedValues) -> None:
        self.values = values
        self.ids = ListTable(num_rows, 1, torch.int32, device, max_ids, fill=0)

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.ids.free(row)
        for admission in plan.admitted:
            if ids := admission.params.requested_ids:
                self.ids.assign(admission.row, np.array(ids, np.int32))

    def flush(self, upload: Upload) -> None:
        self.ids.flush(upload)

    def is_used_by(self, rows: Ints) -> bool:
        return self.ids.entries.is_used_by(rows)

    def prepare(self, rows: Ints, add: Add) -> SomeRows[torch.Tensor] | None:
        if not self.is_used_by(rows):
            return None
        which = np.flatnonzero(self.ids.entries.users(rows))
        table, width, values = self.ids, int(self.ids.sizes[rows[which]].max()), self.values
        at, entries_at = add(which), add(self.ids.entries.of_row[rows[which]])

        def compute(logits: torch.Tensor, tokens: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
            ids = table.tensor[:, :width].index_select(0, indices[entries_at])
            return values.at(logits.index_select(0, indices[at]), ids.long())

        return SomeRows((len(which), width), compute)


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

    def prepare(self, rows: Ints, add: Add) -> SomeRows[TopLogprobs] | None:
        if not self.is_used_by(rows):
            return None
        wanted = self._wanted[rows]
        which = np.flatnonzero(wanted)
        at, width, values = add(which), int(wanted.max()), self._values

        def compute(logits: torch.Tensor, tokens: torch.Tensor, indices: Sequence[torch.Tensor]) -> TopLogprobs:
            index = indices[at]
            return values.top(logits.index_select(0, index), tokens.index_select(0, index), width)

        return SomeRows((len(which), width), compute)


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
