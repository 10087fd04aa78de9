"""Handles Ctrl-C between steps: an interrupt inside a step would leave scheduler and runner in disagreement."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class _Hold:
    """An interrupt inside the block is raised at its end; one outside is raised at once.

    Changing a signal handler takes longer than the guarded code. So the handler is installed for a whole call, and
    reads this object.
    """

    depth = 0
    came = False
    is_watched = False  # whether the handler is installed

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.came and not self.depth:
            self.came = False
            raise KeyboardInterrupt

    def interrupt(self, number: int, frame: object) -> None:
        if not self.depth:
            raise KeyboardInterrupt
        self.came = True


_HOLD = _Hold()  # a single one: only the main thread receives interrupts
_interrupt = _HOLD.interrupt
_NO_HOLD = nullcontext()


@contextmanager
def watched() -> Iterator[AbstractContextManager[None]]:
    """Yields a hold, a context manager for code that must not be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield _NO_HOLD
        return
    if _HOLD.is_watched:
        yield _HOLD
        return
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _interrupt):
        yield _NO_HOLD  # the program has a handler of its own
        return
    _HOLD.came = False
    try:
        signal.signal(signal.SIGINT, _interrupt)
        _HOLD.is_watched = True
        yield _HOLD
    finally:
        _HOLD.is_watched = False
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt inside the block is raised at its end."""
    with watched() as hold, hold:
        yield
