"""LateDraws: the draws of one step by the state of their masks, when all older steps are committed.

A mask is filled already, known without filling (the grammar forces a token, or a background thread has filled it), to
be filled now, or late: a thread still works for its session, so the row sits out the step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import Ints, StepMasks, StepResult
from slipstream.scheduler.grammar.session import Session, Words
from slipstream.scheduler.outputs import Launched

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


# DraftFiller: fills masks along drafts in threads, so that a slow one delays no other row.
#
# Threads take rows in turn. When the forward should have ended, rows that a thread has worked on for longer than the
# budget sit out the step, and so do rows for which no thread is left; the step waits for all others. A thread that is
# too late goes on: the first mask of its row is for a later step. The drafts are dropped then.

_NUM_THREADS = 2  # that fill the masks of one step
_MAX_THREADS = 8  # with those that are late


class DraftRow:
    """A row with drafts, whose masks [draws, words] a thread fills. If it is late it is the job of its session."""

    def __init__(self, session: Session, masks: Words) -> None:
        self.session = session
        self.started: float | None = None  # when a thread began with it
        self.seconds = 0.0  # that the thread took
        self.ended = threading.Event()
        self._masks: Words | None = masks  # None: the step does not wait for them any more
        self._own = np.zeros_like(masks)
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, end: int) -> None:
        """Thread: fill the masks. `end`: bit for the end of the grammar."""
        with self._lock:
            if self._masks is None:
                return
            self.started = time.perf_counter()
        try:
            fill_along(self.session, self._own, end, lambda: self._masks is None)
        except BaseException as error:
            self._error = error
        with self._lock:
            if self._masks is not None:
                self._masks[:] = self._own
            self.seconds = time.perf_counter() - self.started
            self.ended.set()

    def leave(self) -> None:
        """The step does not wait for the masks any more."""
        with self._lock:
            if not self.ended.is_set():
                self._masks = None
                if self.started is not None:
                    self.session.job = self

    @property
    def is_late(self) -> bool:
        return self._masks is None

    def done(self) -> bool:
        return self.ended.is_set()

    def result(self) -> None:
        """Wait until the thread has ended, and give the session its mask if it was late."""
        self.ended.wait()
        if self._error is not None:
            raise self._error
        if self.session.job is self and not self.session.forced:
            self.session.ready = self._own[0]


class DraftFiller:
    def __init__(self, end: int, finished: threading.Event) -> None:
        """`end`: bit for the end of the grammar. `finished` is set when a thread has ended with a row."""
        self._end = end
        self._finished = finished
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []  # of this step, and late ones

    def fill(self, rows: Sequence[DraftRow], budget: float, deadline: float) -> None:
        """Fill the masks of these rows. Rows that take longer than `budget` seconds and are not filled at the deadline
        are late then. A session that took longer than the budget becomes slow."""
        self._fill_in_threads(rows, budget, deadline)
        for row in rows:
            if not row.is_late:
                row.result()
            if row.is_late or row.seconds > budget:
                row.session.note_slow()
            else:
                row.session.is_slow = False

    def _fill_in_threads(self, rows: Sequence[DraftRow], budget: float, deadline: float) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MAX_THREADS, "slipstream-drafts")
        self._running = [each for each in self._running if not each.done()]
        num_threads = min(_NUM_THREADS, len(rows), _MAX_THREADS - len(self._running))
        start, waiting = time.perf_counter(), deque(rows)
        self._running += [self._pool.submit(self._fill_next, waiting) for _ in range(num_threads)]
        for row in rows if num_threads else ():
            while not row.ended.is_set() and (limit := _time_left(row, rows, start, budget, deadline)) > 0:
                row.ended.wait(limit)
        for row in rows:
            row.leave()

    def _fill_next(self, waiting: deque[DraftRow]) -> None:
        while waiting:
            try:
                row = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            row.run(self._end)
            self._finished.set()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _time_left(row: DraftRow, rows: Sequence[DraftRow], start: float, budget: float, deadline: float) -> float:
    """Seconds to wait for this row. `start`: of the threads."""
    begun = row.started
    if begun is None:  # it waits as long as threads begin with other rows
        begun = max((each.started for each in rows if each.started is not None), default=start)
    return max(deadline, begun + budget) - time.perf_counter()


# Masks along drafts: what a grammar allows at each draw of a row with drafts.
#
# The mask of a draw is that of the state after the drafts before it. A draft that its own mask forbids cannot be drawn,
# so it is not accepted, and the masks after it do not matter.

_ALL = 0xFFFFFFFF


def fill_along(session: Session, masks: Words, end: int, is_late: Callable[[], bool] | None = None) -> None:
    """Fill the masks [draws, words] of a session's next draws. `end`: bit for the end of the grammar. `is_late`: then
    only the first mask is needed."""
    matcher = session.matcher.deep_copy()
    forced = session.forced
    for index, mask in enumerate(masks):
        if forced:
            session.write_forced(mask, forced[0])
        elif index == 0 and session.ready is not None:
            mask[:] = session.ready
        else:
            session.fill(mask, matcher)
        draft = session.drafts[index] if index < len(session.drafts) else -1
        is_allowed = 0 <= draft < end and bool(mask[draft >> 5] >> np.uint32(draft & 31) & np.uint32(1))
        if is_late is not None and is_late():
            return
        if index + 1 == len(masks) or not is_allowed or not matcher.consume_token(draft) or matcher.is_stopped():
            masks[index + 1 :].fill(_ALL)
            return
        forced = forced[1:] or matcher.compute_ff_tokens()


# DrawGroup: the requests with a grammar that draw in a plan, kept as long as plans have the same requests.
#
# While no request comes or goes, what begins the masks of a step and what ends them is a few operations over all rows,
# not Python code for each of them. Every condition that a row could miss is checked; if one does, `Constraints` handles
# the rows one by one.


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


# Memory for the masks of a step, of an engine whose runner has none (`Constraints`).


class MaskArray:
    """Memory for masks that the next call reuses."""

    def __init__(self, max_rows: int, num_words: int) -> None:
        self._max_rows = max_rows
        self._masks: Ints = np.zeros((0, num_words), np.int32)

    def __call__(self, num_masks: int) -> StepMasks:
        if num_masks > len(self._masks):
            most = max(num_masks, min(self._max_rows, 2 * num_masks))
            self._masks = np.zeros((most, self._masks.shape[1]), np.int32)
        return StepMasks(self._masks[:num_masks])
