"""LateDraws: the draws of one step by the state of their masks, when all older steps are committed.

A mask is filled already, known without filling (the grammar forces a token, or a background thread has filled it), to
be filled now, or late: a thread still works for its session, so the row sits out the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import StepMasks
from slipstream.scheduler.grammar.draft_filler import DraftRow
from slipstream.scheduler.grammar.session import Session

Drawing = Sequence[tuple[Request, int, int]]
"""Requests with a grammar that draw in a step, their rows, and how many tokens they draw."""


class LateDraws:
    def __init__(self, drawing: Drawing, masks: StepMasks, *, keeps: bool) -> None:
        """Writes masks that are known without filling. `keeps`: see `allow_all`."""
        self.pending: list[tuple[Session, int]] = []  # sessions whose mask is to be filled, and its index
        self.sources: list[Session | None] = []  # by draw of a request; None: all tokens are allowed
        self._drafted: list[tuple[int, int, DraftRow]] = []  # rows with drafts: numbers in `drawing`, first masks
        self._unsure: list[tuple[int, int]] = []  # rows that may sit out: numbers in `drawing`, first masks
        self._drawing = drawing
        self._masks = masks
        self._keeps = keeps
        bits = masks.bits.view(np.uint32)
        index = 0
        for number, (request, _, num) in enumerate(drawing):
            self._add(number, request, index, bits[index : index + num])
            index += num
        self.lengths = [0 if session is None else session.num_taken for session in self.sources]

    def _add(self, number: int, request: Request, index: int, bits: npt.NDArray[np.uint32]) -> None:
        """`index`: of the first mask of the request; `bits`: its masks."""
        session = request.session
        assert session is not None
        if request.status is Status.FINISHED:
            allow_all(self._masks, index, index + len(bits), keeps=self._keeps)  # its tokens will be dropped
            self.sources.append(None)
            return
        self.sources.append(session)
        if session.has_mask and session.job is None:
            session.has_mask = False
            return
        if session.job is not None and not session.is_busy:
            session.job.result()
        if session.is_busy or session.is_complete:  # complete since `advance`: the next step ends the request
            self._unsure.append((number, index))
        elif len(bits) > 1:
            self._drafted.append((number, index, DraftRow(session, bits)))
        elif session.forced:
            session.write_forced(bits[0], session.forced[0])
        elif session.ready is not None:
            bits[0] = session.ready
        else:
            self.pending.append((session, index))
            self._unsure.append((number, index))
        session.has_mask = False

    @property
    def draft_rows(self) -> list[DraftRow]:
        return [row for _, _, row in self._drafted]

    def late(self) -> list[tuple[int, int]]:
        """Rows without drafts whose masks are late after `pending` was filled: numbers in `drawing`, first masks."""
        return [each for each in self._unsure if (own := self.sources[each[0]]) is not None and own.job is not None]

    def late_drafts(self) -> list[tuple[int, int]]:
        """The same of rows with drafts, after `draft_rows` were filled."""
        return [(number, index) for number, index, row in self._drafted if row.is_late]

    def drop(self, number: int, index: int) -> tuple[Request, int]:
        """The request and the row of a draw that the row sits out. Its masks allow all tokens: the draw is dropped."""
        request, row, num = self._drawing[number]
        allow_all(self._masks, index, index + num, keeps=self._keeps)
        self.sources[number] = None
        return request, row


def allow_all(masks: StepMasks, start: int, stop: int, *, keeps: bool) -> None:
    """Masks from `start` to `stop` allow all tokens. `keeps`: bits of masks that the device keeps are still sent, so
    they are not written."""
    if keeps and masks.entries is not None:
        masks.entries[start:stop] = -1
    else:
        masks.bits[start:stop].fill(-1)
