"""LazyHeap: a heap whose entries may become stale."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Any)  # comparable and hashable


class LazyHeap(Generic[T]):
    """Finds the smallest live entry. The owner decides which entries are live, by the same rule in every call.

    A stale entry is removed when it reaches the top, or when the heap has doubled since its last clean-up. So each
    operation takes O(log n), amortised, and the heap keeps at most about twice as many entries as were live at the same
    time. Equal entries count as one.
    """

    __slots__ = ("_heap", "_limit")

    def __init__(self) -> None:
        self._heap: list[T] = []
        self._limit = 64

    def __len__(self) -> int:
        """Number of entries, live or stale."""
        return len(self._heap)

    def push(self, entry: T, is_live: Callable[[T], bool]) -> None:
        if len(self._heap) >= self._limit:
            self._heap = list({old for old in self._heap if is_live(old)})
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, entry)

    def top(self, is_live: Callable[[T], bool]) -> T | None:
        """The smallest live entry, which stays in the heap."""
        heap = self._heap
        while heap:
            if is_live(heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None
