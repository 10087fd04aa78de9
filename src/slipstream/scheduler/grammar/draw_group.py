"""DrawGroup: the requests with a grammar that draw in a plan, kept as long as plans have the same requests.

While no request comes or goes, what begins the masks of a step and what ends them is a few operations over all rows,
not Python code for each of them. Every condition that a row could miss is checked; if one does, `Constraints` handles
the rows one by one.
"""

from __future__ import annotations

import numpy as np

from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import StepResult
from slipstream.scheduler.grammar.session import Session
from slipstream.scheduler.in_flight import Launched


class DrawGroup:
    """Also the batch of its sessions for `MaskPool`: row i of the batch has the mask with index i."""

    __slots__ = (
        "sampling", "admissions", "drawing", "requests", "sessions", "rows", "_where", "_stop_ids", "_inputs",
        "_address",
    )  # fmt: skip

    def __init__(self, sampling: list[Request], admissions: list[int]) -> None:
        """`sampling`: all requests that draw in the plan, one token each. Some of them have no grammar."""
        self.sampling = sampling
        self.admissions = admissions
        self.requests: list[Request] = []
        self.sessions: list[Session] = []
        where = []
        for index, request in enumerate(sampling):
            if request.session is not None:
                self.requests.append(request)
                self.sessions.append(request.session)
                where.append(index)
        self.drawing = [(request, request.row, 1) for request in self.requests]
        self.rows = np.array([request.row for request in self.requests], np.int32)
        self._where = None if len(where) == len(sampling) else np.array(where)
        self._stop_ids = frozenset[int]().union(*[request.stop_ids for request in self.requests])
        # of each row matcher, walker, token, forced token and index, as `slip_masks_start` takes them
        self._inputs = np.empty((len(where), 5), np.int64)
        self._inputs[:, :2] = np.array([session.pointers for session in self.sessions], np.int64).reshape(-1, 2)
        self._inputs[:, 4] = range(len(where))
        self._address = self._inputs.ctypes.data

    def is_of(self, sampling: list[Request], admissions: list[int]) -> bool:
        """Whether a plan in which these requests draw, under these admissions, has this group."""
        return sampling == self.sampling and admissions == self.admissions

    def hold_slow(self) -> None:
        """Leave requests with slow masks out of the next plan."""
        for request, session in zip(self.requests, self.sessions, strict=True):
            if session.is_slow:
                request.hold()

    def take(self, launched: Launched, result: StepResult) -> bool:
        """The group of the newest plan takes the tokens of the step before it: its inputs are complete. False if it was
        not the group of that step, or if a row needs more than that; then nothing has changed."""
        if not self.is_of(launched.requests, launched.admissions) or np.count_nonzero(result.failed):
            return False
        tokens = result.tokens if self._where is None else result.tokens[self._where]
        if not self._stop_ids.isdisjoint(tokens.tolist()):
            return False
        for (request, _, _), session in zip(self.drawing, self.sessions, strict=True):
            # none but this token and the draw of the newest plan is pending
            if request.pending != 2 or session.job is not None or session.num_taken != len(session.tokens):
                return False
        if [request.admission for request in self.sampling] != self.admissions:
            return False
        inputs = self._inputs
        inputs[:, 2] = tokens
        inputs[:, 3] = -1
        for index, session in enumerate(self.sessions):
            session.num_taken += 1
            if session.forced:
                del session.forced[0]
                if session.forced:
                    inputs[index, 3] = session.forced[0]
        return True

    def is_filled(self) -> bool:
        """Whether all requests run, and no mask is late, of those that were begun after `take`."""
        for request, session in zip(self.requests, self.sessions, strict=True):
            if session.job is not None or request.status is Status.FINISHED:
                return False
        return True

    def lengths(self) -> list[int]:
        """The tokens that each session has taken."""
        return [session.num_taken for session in self.sessions]

    def index_of(self, number: int) -> int:
        return number

    def packed(self) -> tuple[int, object]:
        """The address of the inputs, and what must live while it is read."""
        return self._address, self._inputs
