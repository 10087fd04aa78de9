"""Long work that must not block the event loop: native code such as tokenisation runs in a few threads, with bounded
memory, Python code in pieces between turns of the loop (threads would keep the loop waiting for the interpreter lock).

glibc keeps freed memory in one arena per thread, and a tokenizer allocates about a hundred bytes per character in small
blocks. Without `trim_heap` and `bound_heap`, a front end that has read a few large texts would hold gigabytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from slipstream.base.host import num_cpus

T = TypeVar("T")

LONG = (
    8192  # characters or token ids from which a function runs in a thread; shorter calls take less time than the switch
)
PROMPT_COST = 128  # characters that take as long to tokenise as the fixed cost of a prompt
TURN = 2**15  # bytes that an answer grows by in one turn of the event loop: a few milliseconds of logprobs
_TRIM_SIZE = 2**18  # characters of one call from which the heap is trimmed after it

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # parameters of mallopt
_MMAP_SIZE = 2**20  # bytes: larger blocks are mapped on their own, and unmapped when freed
_MAX_ARENAS = 4


class Offload:
    """A thread pool that calls functions in the order of arrival."""

    def __init__(self, threads: int | None = None) -> None:
        count = min(num_cpus(), 8) if threads is None else threads
        self._pool = ThreadPoolExecutor(count, "slipstream-long-texts")
        self._lock = threading.Lock()
        self.size = 0  # characters of calls that wait or run

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Returns the result of `function` on `size` characters. From `LONG` characters on, a thread calls it."""
        if size < LONG:
            return function()
        with self._lock:
            self.size += size
        future = self._pool.submit(_run, size, function)

        def release(done: Future[Any]) -> None:  # also runs where the call was cancelled before it started
            with self._lock:
                self.size -= size

        future.add_done_callback(release)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # breaks the reference cycle of an exception and this frame


def _run(size: int, function: Callable[[], T]) -> T:
    try:
        return function()
    finally:
        if size >= _TRIM_SIZE:
            trim_heap()


OFFLOAD = Offload()
"""The pool of this process."""
off_loop = OFFLOAD.run


class AnswerPieces:
    """Builds answers in pieces. All callers together build at most `TURN` bytes per turn of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def join(self, pieces: Iterable[bytes]) -> list[bytes]:
        """All bytes of `pieces`, in parts of about `TURN` bytes. What is small is built at once. An empty piece stands
        for work of a whole turn."""
        parts: list[bytes] = []
        part, size = list[bytes](), 0
        for piece in pieces:
            part.append(piece)
            size += len(piece) or TURN
            if size >= TURN:
                parts.append(b"".join(part))
                part, size = [], 0
                async with self._lock:
                    await asyncio.sleep(0)
        return [*parts, b"".join(part)] if part else parts


def size_of(prompt: object) -> int:
    """The number of characters or token ids of a prompt of any form."""
    if isinstance(prompt, Mapping):
        return sum(map(size_of, prompt.values()))
    if isinstance(prompt, tuple) and any(isinstance(one, str) for one in prompt[:2]):
        return sum(map(size_of, prompt))  # a pair of texts
    if isinstance(prompt, np.ndarray):
        return prompt.size if prompt.ndim else 0
    return len(prompt) if isinstance(prompt, Sequence | array) else 0


def bound_heap() -> None:
    """Limits glibc's arenas and the size of blocks in them. Call before the process starts threads."""
    if (mallopt := _libc_function("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_SIZE)
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def trim_heap() -> None:
    """Returns free memory to the system. Takes milliseconds."""
    if (malloc_trim := _libc_function("malloc_trim")) is not None:
        malloc_trim(0)


def _libc_function(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
        return found
    except (AttributeError, OSError, TypeError):  # a C library other than glibc
        return None
