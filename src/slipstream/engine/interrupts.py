"""Ctrl-C between steps: one that comes in the middle would leave the two halves disagreeing about what was launched."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt that comes inside is raised at the end. Only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield  # somebody handles it in a way of their own
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
