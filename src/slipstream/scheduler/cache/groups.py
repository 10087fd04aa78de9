"""The policy of one cache group: which pages a request of some length must hold.

A kind of memory that behaves otherwise (a recurrent state) is another class with the same methods, chosen by its spec
in `make_group`. A request has a place for every page of its positions; where it holds none any more, the place has
the null page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.cache_spec import CacheSpec, WindowSpec
from slipstream.scheduler.cache.pages import PagePool
from slipstream.step import NULL_PAGE

HashAt = Callable[[int], bytes]
"""The hash of a request's n-th full page; made when first asked for."""


class Group(Protocol):
    """One group's policy and its pages."""

    pool: PagePool

    def pages_for(self, length: int) -> int:
        """Pages a request of this length holds at once, at most."""

    def first_needed(self, length: int) -> int:
        """The first place whose page is read by the position that follows `length` computed ones, or by later ones."""

    def match(self, hash_at: HashAt, limit: int, known: Sequence[int] = ()) -> list[int]:
        """Pages of the longest prefix that can be continued from the cache, at most `limit` pages long.

        `known`: the answers for the first hashes, where every position is kept; they are not asked for again.
        """


class FullGroup:
    """Every position is kept for as long as the request lives; page n holds the n-th `page_size` positions."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def first_needed(self, length: int) -> int:
        return 0

    def match(self, hash_at: HashAt, limit: int, known: Sequence[int] = ()) -> list[int]:
        find = self.pool.find
        pages = list(known)
        for place in range(len(pages), limit):
            page = find(hash_at(place))
            if page is None:
                break
            pages.append(page)
        return pages


class WindowGroup:
    """A position sees the last `window` alone, itself among them, so pages wholly before that are given back."""

    def __init__(self, spec: WindowSpec, num_pages: int, step_tokens: int) -> None:
        self.spec = spec
        self.step_tokens = step_tokens
        self.pool = PagePool(num_pages)

    def pages_for(self, length: int) -> int:
        return self.spec.max_pages(length, self.step_tokens)

    def first_needed(self, length: int) -> int:
        return max(0, length - self.spec.window + 1) // self.spec.page_size

    def match(self, hash_at: HashAt, limit: int, known: Sequence[int] = ()) -> list[int]:
        """Only the last window before the prefix's end must be there."""
        find, page_size = self.pool.find, self.spec.page_size
        found: list[int] = []  # of neighbouring places, the last first
        end = limit
        for place in range(limit - 1, -1, -1):
            if place < self.first_needed(end * page_size):
                break
            page = find(hash_at(place))
            if page is None:
                found, end = [], place
            else:
                found.append(page)
        return [NULL_PAGE] * (end - len(found)) + found[::-1]


def make_group(spec: CacheSpec, num_pages: int, step_tokens: int) -> Group:
    """`step_tokens`: the most positions that one step adds."""
    if isinstance(spec, WindowSpec):
        return WindowGroup(spec, num_pages, step_tokens)
    return FullGroup(spec.page_size, num_pages)
