"""Ahead: a list made part by part, the next one by a thread while those before are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Part = TypeVar("Part")
T = TypeVar("T")


class Lookahead(Generic[Part, T]):
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
