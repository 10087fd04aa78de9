"""DraftFiller: fills masks along drafts in threads, so that a slow one delays no other row.

Threads take rows in turn. When the forward should have ended, rows that a thread has worked on for longer than the
budget sit out the step, and so do rows for which no thread is left; the step waits for all others. A thread that is too
late goes on: the first mask of its row is for a later step. The drafts are dropped then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from slipstream.scheduler.grammar.draft_masks import fill_along
from slipstream.scheduler.grammar.session import Session, Words

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
