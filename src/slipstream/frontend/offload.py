"""Offload: work that would hold an event loop, done by a few threads. Here that is tokenising long texts.

So no more texts are read at once than there are threads, and memory that large ones took is given back to the system.
"""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from slipstream.frontend.heap import give_back

T = TypeVar("T")

LONG = 8192  # characters or token ids that are read in a thread; fewer take less time than the way there
EACH = 128  # characters that take as long to read as a prompt does beside its own
_MUCH = 2**18  # characters after which memory is given back


class Offload:
    """Runs work in a few threads, in the order in which it comes."""

    def __init__(self, threads: int | None = None) -> None:
        count = min(os.cpu_count() or 1, 8) if threads is None else threads
        self._pool = ThreadPoolExecutor(count, "slipstream-long-texts")
        self._lock = threading.Lock()
        self.size = 0  # characters that wait for a thread or are read by one

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns: it is done at once where `size` is small, else by a thread."""
        if size < LONG:
            return work()
        with self._lock:
            self.size += size
        future = self._pool.submit(_do, size, work)

        def leave(done: Future[Any]) -> None:  # also where it was cancelled before a thread had time for it
            with self._lock:
                self.size -= size

        future.add_done_callback(leave)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # its error would keep this frame, and this frame its error


def _do(size: int, work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        if size >= _MUCH:
            give_back()


OFFLOAD = Offload()
"""Of this process."""
off_loop = OFFLOAD.run


def size_of(prompt: object) -> int:
    """Its characters or token ids, whatever its form."""
    if isinstance(prompt, Mapping):
        return sum(map(size_of, prompt.values()))
    if isinstance(prompt, tuple) and any(isinstance(one, str) for one in prompt[:2]):
        return sum(map(size_of, prompt))  # a pair of texts
    if isinstance(prompt, np.ndarray):
        return prompt.size if prompt.ndim else 0
    return len(prompt) if isinstance(prompt, Sequence | array) else 0
