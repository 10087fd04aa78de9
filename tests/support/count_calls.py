"""Counts the calls of functions that some code makes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Calls:
    """The number of calls of Python and C functions so far."""

    def __init__(self) -> None:
        self.number = 0

    def add(self, frame: FrameType, event: str, value: object) -> None:
        self.number += event in ("call", "c_call")


@contextmanager
def count_calls() -> Iterator[Calls]:
    """Counts calls in this thread; garbage waits, since its finalizers and the callbacks of gc are calls of others."""
    calls = Calls()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(calls.add)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
