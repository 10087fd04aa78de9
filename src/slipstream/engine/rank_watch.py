"""RankWatch: a thread that waits for the end of another process with a part of the model."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from slipstream.contracts.step import Handle

CLOSED_BY_PEER = getattr(select, "POLLRDHUP", select.POLLHUP)
"""Event of a socket whose other end was closed, whether or not data was read."""
_CLOSE_SECONDS = 5.0


class RankWatch:
    def __init__(self, files: Sequence[int], on_end: Callable[[], None], event: int = select.POLLIN) -> None:
        """`files`: each has `event` when a process ends. `on_end` is called in the thread, once, for the first."""
        self._on_end = on_end
        self._stopped, self._stops = os.pipe()
        self._poll = select.poll()
        for file in files:
            self._poll.register(file, event)
        self._poll.register(self._stopped, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="slipstream-rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        os.write(self._stops, b"s")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._stops)
        os.close(self._stopped)

    def _run(self) -> None:
        ready = {file for file, _ in self._poll.poll()}
        if self._stopped not in ready:
            self._on_end()


def wait_for_step(handle: Handle | None) -> None:
    """Waits for the newest step of an engine that closes, a few seconds at most: other ranks must not lose this one's
    memory while they compute with it."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    with contextlib.suppress(Exception):  # the step has failed, and its error was raised where it was waited for
        while handle is not None and not handle.done() and time.monotonic() < deadline:
            time.sleep(0.001)
