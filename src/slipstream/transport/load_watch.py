"""LoadWatch: ends a core that loads its models when the last front end has disconnected.

A core reads its sockets between steps, so during the load, which may take minutes, it would not notice. A thread does:
it interrupts the load with an exception, so that temporary folders and children of the load are removed, and exits the
process if that does not end it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType

_POLL_MS = 100
_UNWIND_SECONDS = 5.0  # for the load to end by the exception
_INTERRUPT = signal.SIGUSR2


class FrontEndsGone(BaseException):
    """No front end is left that waits for the load."""


class LoadWatch:
    """A context manager around the load, in the main thread."""

    def __init__(self, sockets: Iterable[int]) -> None:
        """`sockets`: file descriptors of all connections."""
        self.has_fired = False
        self._sockets = set(sockets)
        self._loaded = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        signal.signal(_INTERRUPT, _raise)
        threading.Thread(target=self._watch, name="slipstream-load-watch", daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:  # from here on the thread sends no signal
            self._loaded.set()
        signal.signal(_INTERRUPT, signal.SIG_IGN)

    def _watch(self) -> None:
        poll = select.poll()
        for file in self._sockets:
            poll.register(file, getattr(select, "POLLRDHUP", 0))  # hang-ups are always reported
        while self._sockets:
            for file, _ in poll.poll(_POLL_MS):
                poll.unregister(file)
                self._sockets.discard(file)
            if self._loaded.is_set():
                return
        with self._lock:
            if self._loaded.is_set():
                return
            self.has_fired = True
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
        time.sleep(_UNWIND_SECONDS)
        os._exit(0)


def _raise(number: int, frame: FrameType | None) -> None:
    raise FrontEndsGone
