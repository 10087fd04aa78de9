"""Ctrl-C between steps: one that comes in the middle would leave the two halves disagreeing about what was launched."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class _Hold:
    """An interrupt that comes inside is raised at the end; one that comes outside, at once.

    To change a signal's handler takes longer than what is to be guarded. So the handler stays for a whole call, and
    looks here.
    """

    depth = 0
    came = False
    is_watched = False  # by the handler

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


_HOLD = _Hold()  # one for all: only the main thread gets interrupts
_interrupt = _HOLD.interrupt
_NO_HOLD = nullcontext()


@contextmanager
def watched() -> Iterator[AbstractContextManager[None]]:
    """Gives a hold to open as often as there is something that must not be torn."""
    if threading.current_thread() is not threading.main_thread():
        yield _NO_HOLD
        return
    if _HOLD.is_watched:
        yield _HOLD
        return
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _interrupt):
        yield _NO_HOLD  # somebody handles it in a way of their own
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
    """An interrupt that comes inside is raised at the end."""
    with watched() as hold, hold:
        yield
