"""Work beside the work that waits for it. Ahead: a list made part by part, the next one by a thread while those before
are used; off_loop: what would keep an event loop from others."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

Part = TypeVar("Part")
T = TypeVar("T")


class Ahead(Generic[Part, T]):
    """For work that lets others run meanwhile, as encoding texts does. With one part there is no thread.

    Other work is not done `beside`, but when it is asked for.
    """

    def __init__(self, make: Callable[[Part], list[T]], parts: Iterable[Part], *, beside: bool = True) -> None:
        self._make = make
        self._beside = beside
        self._parts = deque(parts)
        self._made: deque[T] = deque()
        self._coming: Future[list[T]] | None = None
        self._thread: ThreadPoolExecutor | None = None  # ends when it is dropped

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._made:
            self._turn()
        return self._made.popleft()

    def is_ready(self) -> bool:
        """Whether the next one, or that there is none, is known at once."""
        return bool(self._made) or (not self._parts if self._coming is None else self._coming.done())

    def _turn(self) -> None:
        coming, self._coming = self._coming, None
        try:
            if coming is not None:
                made = coming.result()
            elif self._parts:
                made = self._make(self._parts.popleft())
            else:
                raise StopIteration
        except BaseException:
            self._parts.clear()  # nothing comes after a part that failed
            self._thread = None
            raise
        finally:
            del coming  # its error would keep this frame, and this frame its error
        if self._parts and self._beside:
            self._thread = self._thread or ThreadPoolExecutor(1, "slipstream-texts")
            self._coming = self._thread.submit(self._make, self._parts.popleft())
        else:
            self._thread = None
        self._made.extend(made)


LONG = 8192  # characters or token ids that are read in a thread; fewer take less time than the way there
EACH = 128  # characters that take as long to read as a prompt does beside its own


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Tokenising: short texts here and now, long ones beside the loop, which others wait for."""
    return work() if size < LONG else await asyncio.to_thread(work)


def size_of(prompt: object) -> int:
    """Its characters or token ids, whatever its form."""
    if isinstance(prompt, Mapping):
        return sum(map(size_of, prompt.values()))
    if isinstance(prompt, tuple) and any(isinstance(one, str) for one in prompt[:2]):
        return sum(map(size_of, prompt))  # a pair of texts
    if isinstance(prompt, np.ndarray):
        return prompt.size if prompt.ndim else 0
    return len(prompt) if isinstance(prompt, Sequence | array) else 0
