"""Callers take turns, whatever amount of work each has queued: `CallerTurns`, and threads that work so.

The next piece of work is of a waiting caller with the fewest pieces that run; among these, of the one whose last piece
ended first. So a caller with none running waits until a thread is free, and for one piece of each other caller.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from slipstream.base.errors import QueueFull

T = TypeVar("T")


class _Caller(Generic[T]):
    __slots__ = ("queued", "num_running", "turn")

    def __init__(self, turn: int) -> None:
        self.queued: dict[object, T] = {}  # by key, the oldest first
        self.num_running = 0
        self.turn = turn  # when it came, or when its last piece ended


class CallerTurns(Generic[T]):
    """A queue per caller. Not locked."""

    def __init__(self, most_running: int) -> None:
        """`most_running`: pieces of one caller at a time."""
        self._most_running = most_running
        self._callers: dict[str, _Caller[T]] = {}
        self._turns = itertools.count()

    def add(self, caller: str, key: object, piece: T) -> None:
        if caller not in self._callers:
            self._callers[caller] = _Caller(next(self._turns))
        self._callers[caller].queued.setdefault(key, piece)

    def num_queued(self, caller: str) -> int:
        own = self._callers.get(caller)
        return 0 if own is None else len(own.queued)

    def discard(self, caller: str, key: object) -> None:
        """Remove a piece, if it is queued."""
        if (own := self._callers.get(caller)) is not None:
            own.queued.pop(key, None)
            self._forget_idle(caller)

    def take(self) -> tuple[str, T] | None:
        """The next piece, and its caller, for whom `end` is called after it."""
        waiting = [
            name for name, each in self._callers.items() if each.queued and each.num_running < self._most_running
        ]
        if not waiting:
            return None
        first = min(waiting, key=lambda name: (self._callers[name].num_running, self._callers[name].turn))
        own = self._callers[first]
        own.num_running += 1
        return first, own.queued.pop(next(iter(own.queued)))

    def end(self, caller: str) -> None:
        if (own := self._callers.get(caller)) is not None:  # else the queue was cleared
            own.num_running -= 1
            own.turn = next(self._turns)
            self._forget_idle(caller)

    def clear(self) -> None:
        self._callers.clear()

    def _forget_idle(self, caller: str) -> None:
        own = self._callers[caller]
        if not own.queued and not own.num_running:
            del self._callers[caller]


class FairThreads:
    """Threads for callers that take turns. A future that is cancelled while it waits leaves the queue at once.

    The threads are daemons: a call that hangs, for example in the system's resolver, does not hold up the end of the
    process, as a ThreadPoolExecutor's would.
    """

    def __init__(self, count: int, name: str, max_queued: int, what: str) -> None:
        """`max_queued`: calls of one named caller. `what` they are about, for an error."""
        self._count = count
        self._name = name
        self._max_queued = max_queued
        self._what = what
        self._changed = threading.Condition()  # with the lock of all that follows
        self._turns: CallerTurns[tuple[Future[Any], Callable[[], Any]]] = CallerTurns(count)
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, caller: str, function: Callable[[], T]) -> Future[T]:
        """Raises QueueFull if this caller has too many. The empty name is the program itself, without a limit."""
        future: Future[T] = Future()
        with self._changed:
            if caller and self._turns.num_queued(caller) >= self._max_queued:
                raise QueueFull(
                    f"{self._max_queued} {self._what} of this client wait for a thread, the limit; send more when some "
                    "of these requests have their first token"
                )
            self._turns.add(caller, future, (future, function))
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        future.add_done_callback(lambda done: self._leave(caller, done))
        return future

    def close(self, *, wait: bool) -> None:
        """Cancels the calls that have not started. `wait`: until the others have ended."""
        waiting = []
        with self._changed:
            while (taken := self._turns.take()) is not None:
                waiting.append(taken[1][0])
            self._turns.clear()
            self._is_closed = True
            self._changed.notify_all()
        for future in waiting:
            future.cancel()
        for thread in self._threads if wait else ():
            thread.join()

    def _leave(self, caller: str, future: Future[Any]) -> None:
        if future.cancelled():
            with self._changed:
                self._turns.discard(caller, future)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            caller, (future, function) = taken
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del future, function, taken  # a result is not kept until the next call
            with self._changed:
                self._turns.end(caller)
                self._changed.notify()

    def _next(self) -> tuple[str, tuple[Future[Any], Callable[[], Any]]] | None:
        """Waits for a call; None: no more come."""
        with self._changed:
            while (taken := self._turns.take()) is None and not self._is_closed:
                self._changed.wait()
            return taken
