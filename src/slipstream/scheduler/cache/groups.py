"""The policy of one cache group: which pages a request of some length must hold.

A kind of memory that behaves otherwise (a window that forgets, a recurrent state) is another class with the same
methods, chosen by its spec in `make_group`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slipstream.cache_spec import CacheSpec
from slipstream.scheduler.cache.pages import PagePool

HashAt = Callable[[int], bytes]
"""The hash of a request's n-th full page; made when first asked for."""


class Group(Protocol):
    """One group's policy and its pages."""

    pool: PagePool

    def pages_for(self, length: int) -> int:
        """Pages a request holds once `length` positions are computed."""

    def positions_in(self, num_pages: int) -> int:
        """Positions that can be computed before more pages are needed."""

    def match(self, hash_at: HashAt, limit: int) -> list[int]:
        """Pages of the longest prefix that is in the cache, at most `limit` pages long."""


class FullGroup:
    """Every position is kept for as long as the request lives; page n holds the n-th `page_size` positions."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def positions_in(self, num_pages: int) -> int:
        return num_pages * self.page_size

    def match(self, hash_at: HashAt, limit: int) -> list[int]:
        find = self.pool.find
        pages: list[int] = []
        for place in range(limit):
            page = find(hash_at(place))
            if page is None:
                break
            pages.append(page)
        return pages


def make_group(spec: CacheSpec, num_pages: int) -> Group:
    return FullGroup(spec.page_size, num_pages)
