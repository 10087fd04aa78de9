"""WindowCache: the cache of layers with sliding-window attention. A request gives back the pages before its window."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.contracts.cache_spec import WindowSpec
from slipstream.contracts.step import NULL_PAGE
from slipstream.scheduler.cache.kind import Find, HashAt
from slipstream.scheduler.cache.paged import PagedCache


class WindowCache(PagedCache):
    """A position attends to the last `window` positions, itself included."""

    keeps_all = False

    def __init__(self, index: int, spec: WindowSpec, num_pages: int, step_tokens: int) -> None:
        super().__init__(index, spec, num_pages, step_tokens)
        self.spec = spec

    def pages_for(self, length: int) -> int:
        return self.spec.max_pages(length, self.step_tokens)

    def first_needed(self, length: int) -> int:
        return max(0, length - self.spec.window + 1) // self.page_size

    def match(self, hash_at: HashAt, limit: int, known: Sequence[int] = (), find: Find | None = None) -> list[int]:
        """Only the last window before the end of the prefix must be cached; entries before it get the null page."""
        find = find or self.pool.find
        found: list[int] = []  # pages of consecutive entries, last entry first
        end = limit
        for entry in range(limit - 1, -1, -1):
            if entry < self.first_needed(end * self.page_size):
                break
            page = find(hash_at(entry))
            if page is None:
                found, end = [], entry
            else:
                found.append(page)
        return [NULL_PAGE] * (end - len(found)) + found[::-1]
