"""CacheKind: the interface between the cache manager and the cache of one group of layers.

A new kind of cache (for example a recurrent state with checkpoints) is a new file with a class of this shape, a spec in
`cache_spec.py` and an entry in `KINDS` in `manager.py`. The manager asks every group the same questions, and changes
nothing before all groups have agreed.

Entry n of a request's page table is the page of its n-th `page_size` positions. An entry whose page the request no
longer holds has the null page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from slipstream.contracts.request import Request
from slipstream.scheduler.cache.pages import PagePool

HashAt = Callable[[int], bytes]
"""The hash of a request's n-th full page, computed on first use."""

Find = Callable[[bytes], int | None]
"""Looks up the page with a hash."""

Run = tuple[int, int, list[int]]
"""A change of consecutive entries of a request's page table: the group, the first entry, the pages."""


class CacheKind(Protocol):
    """The cache of one group of layers: its pages, and which of them a request holds (`request.pages[index]`)."""

    index: int  # number of the group
    pool: PagePool
    keeps_all: bool  # whether a request holds all its pages until it is released

    def pages_for(self, length: int) -> int:
        """Maximum number of pages that a request of this length holds at the same time."""

    def first_needed(self, length: int) -> int:
        """The first entry whose page is read by position `length` or a later one."""

    def match(self, hash_at: HashAt, limit: int, known: Sequence[int] = (), find: Find | None = None) -> list[int]:
        """Pages of the longest cached prefix of at most `limit` pages from which a request can continue.

        `known`: results for the leading entries that are still valid. Only a kind that keeps all pages may use them.
        `find`: instead of the pool's.
        """

    def share(self, request: Request, pages: list[int]) -> None:
        """Admit a request: it holds these pages of other requests, which a match or a fork has found."""

    def can_reserve(self, request: Request, num_entries: int, unneeded: Sequence[int] = ()) -> bool:
        """Whether there are enough free pages for `reserve`, once the pages `unneeded` are released."""

    def reserve(self, request: Request, num_entries: int) -> Run | None:
        """Take pages until the request's table has so many entries; None if it has them already."""

    def unneeded(self, request: Request) -> Run:
        """Pages of a running request that no step in flight and no later step reads."""

    def publish(self, request: Request, new: slice) -> None:
        """Make the pages of these entries findable by `request.hashes`."""

    def release(self, request: Request, unneeded: Run | None = None) -> None:
        """Give back `unneeded`, whose entries get the null page; without it, all pages of the request."""

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariants of the pool and of what these requests, all that hold pages, hold. For tests."""
