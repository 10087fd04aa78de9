"""PagedCache: the cache of layers that read every earlier position. A request keeps its pages until it is released."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from slipstream.contracts.cache_spec import CacheGroup, CacheSpec, PagedSpec, WindowSpec
from slipstream.contracts.request import NEVER, Request
from slipstream.contracts.step import NULL_PAGE


class PagedCache:
    """Also the base of kinds that hold fewer pages: they override `keeps_all`, `pages_for`, `first_needed`, `match`."""

    keeps_all = True

    def __init__(self, index: int, spec: PagedSpec, num_pages: int, step_tokens: int) -> None:
        """`step_tokens`: the maximum number of positions that one step adds to a request."""
        self.index = index
        self.page_size = spec.page_size
        self.step_tokens = step_tokens
        self.pool = PagePool(num_pages)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def first_needed(self, length: int) -> int:
        return 0

    def match(self, hash_at: HashAt, limit: int, known: Sequence[int] = (), find: Find | None = None) -> list[int]:
        find = find or self.pool.find
        pages = list(known)
        for entry in range(len(pages), limit):
            page = find(hash_at(entry))
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, request: Request, pages: list[int]) -> None:
        if pages:
            self.pool.share(real_pages(pages))
        request.pages.append(list(pages))

    def can_reserve(self, request: Request, num_entries: int, unneeded: Sequence[int] = ()) -> bool:
        num_free = self.pool.num_free + (self.pool.num_used_once(unneeded) if unneeded else 0)
        return num_entries - len(request.pages[self.index]) <= num_free

    def reserve(self, request: Request, num_entries: int) -> Run | None:
        used = request.pages[self.index]
        first = len(used)
        if num_entries <= first:
            return None
        pages = self.pool.take(num_entries - first)
        used += pages
        return self.index, first, pages

    def unneeded(self, request: Request) -> Run:
        """Steps in flight may read what the launched length no longer needs, so the committed length decides."""
        used = request.pages[self.index]
        stop = self.first_needed(request.num_committed)
        first = stop
        while first and used[first - 1] != NULL_PAGE:
            first -= 1
        return self.index, first, used[first:stop]

    def publish(self, request: Request, new: slice) -> None:
        self.pool.publish(request.pages[self.index][new], request.hashes[new])

    def release(self, request: Request, unneeded: Run | None = None) -> None:
        used = request.pages[self.index]
        if unneeded is None:
            self.pool.release(real_pages(used))
            used.clear()
            return
        _, first, pages = unneeded
        self.pool.release(pages[::-1])  # so that the pages of the earliest positions are reused first
        used[first : first + len(pages)] = [NULL_PAGE] * len(pages)

    def check(self, requests: Iterable[Request]) -> None:
        pool = self.pool
        pool.check()
        holders: Counter[int] = Counter()
        users: dict[int, set[tuple[str, int]]] = {}  # by page: request ids and entries
        for request in requests:
            used = request.pages[self.index]
            pages = real_pages(used)
            assert NULL_PAGE not in used[self.first_needed(request.num_committed) :], f"{request} lacks a page: {used}"
            assert len(set(pages)) == len(pages), f"{request} holds a page twice: {used}"
            holders.update(pages)
            for entry, page in enumerate(used):
                users.setdefault(page, set()).add((request.id, entry))
            assert request.num_published <= len(used), f"{request} published {request.num_published} of {len(used)}"
            assert len(used) * self.page_size >= request.capacity, f"{request} has fewer pages than its capacity"
            assert request.computed <= request.capacity, f"{request} computed past its {request.capacity} positions"
        for page in range(1, pool.num_pages):
            assert pool.refs[page] == holders[page], (
                f"page {page} of group {self.index}: {pool.refs[page]} references, {holders[page]} holders"
            )
            if holders[page] > 1 and not pool.is_published(page):
                assert len(users[page]) == 1, f"page {page} is unpublished and shared by {users[page]}"


def real_pages(entries: Sequence[int]) -> list[int]:
    """The pages among these entries, without the null page."""
    return [page for page in entries if page != NULL_PAGE]


# PagePool: reference counts of the pages of one group, and the hashes by which their content is found.
#
# When the last request that holds a page releases it, the page becomes free but keeps its content and its hash. A later
# request can find it again until the page is taken for other content.


class PagePool:
    """Pages 1 to num_pages - 1. Page 0 is the null page, which no request holds."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"a pool of {num_pages} pages has only the null page"
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        # Free pages, the next to be taken first. An OrderedDict also removes a page from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self.num_freed = 0  # how often a page has become free so far
        self._watched: dict[bytes, int] = {}  # hashes and their indices
        self._first_changed = NEVER
        # called with every page that becomes free and can be found, and with its hash
        self.on_free: Callable[[int, bytes], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def take(self, count: int) -> list[int]:
        """Free pages to write into, least recently used first. Their content can no longer be found."""
        free, refs, hash_of = self._free, self.refs, self._hash_of
        assert count <= len(free), f"{count} pages taken, {len(free)} are free"
        pages = []
        for _ in range(count):
            page, _none = free.popitem(last=False)
            refs[page] = 1
            if hash_of[page] is not None:
                self.unpublish(page)
                hash_of[page] = None
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of these pages, free or used."""
        refs = self.refs
        for page in pages:
            if refs[page] == 0:
                del self._free[page]
            refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder from each of these pages, which are in the order of their positions.

        A page cannot be used without the pages before it, so later pages are reused first. A page without a hash cannot
        be found, so it is reused before all pages with one.
        """
        refs, free, hash_of = self.refs, self._free, self._hash_of
        for page in reversed(pages):
            assert refs[page] > 0, f"page {page} was released more often than taken"
            refs[page] -= 1
            if refs[page] == 0:
                free[page] = None
                self.num_freed += 1
                if (page_hash := hash_of[page]) is None:
                    free.move_to_end(page, last=False)
                elif self.on_free is not None and self._page_of.get(page_hash) == page:
                    self.on_free(page, page_hash)

    def find(self, page_hash: bytes) -> int | None:
        return self._page_of.get(page_hash)

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of these pages are free now."""
        refs = self.refs
        return sum(1 for page in pages if refs[page] == 0)

    def num_used_once(self, pages: Sequence[int]) -> int:
        """How many of these pages would be free with one holder less."""
        refs = self.refs
        return sum(1 for page in pages if refs[page] == 1)

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make used pages findable by hash. A hash that another page has already keeps that page. Null pages are
        skipped."""
        refs, page_of, hash_of = self.refs, self._page_of, self._hash_of
        for page, page_hash in zip(pages, hashes, strict=True):
            if page != NULL_PAGE and page_hash not in page_of:
                assert refs[page] > 0, f"page {page} is published while no request holds it"
                page_of[page_hash] = page
                hash_of[page] = page_hash
                self._note_change(page_hash)

    def unpublish(self, page: int) -> None:
        """Make this page unfindable. Requests that hold it keep it."""
        page_hash = self._hash_of[page]
        if page_hash is not None and self._page_of.get(page_hash) == page:
            del self._page_of[page_hash]
            self._note_change(page_hash)

    def unpublish_all(self) -> None:
        """Make all pages unfindable."""
        for page in list(self._page_of.values()):
            self.unpublish(page)

    def watch(self, hashes: Sequence[bytes]) -> None:
        """From now on, record when the answer of `find` for one of these hashes changes."""
        self._watched = dict(zip(hashes, range(len(hashes)), strict=True))
        self._first_changed = NEVER

    def take_changed(self) -> int:
        """The index of the first watched hash whose answer changed since the last call; NEVER if none did."""
        changed, self._first_changed = self._first_changed, NEVER
        return changed

    def _note_change(self, page_hash: bytes) -> None:
        if self._watched and (index := self._watched.get(page_hash, NEVER)) < self._first_changed:
            self._first_changed = index

    def hash_of(self, page: int) -> bytes | None:
        """The hash under which the page was published since it was last taken, if it was."""
        return self._hash_of[page]

    def is_published(self, page: int) -> bool:
        """Whether the page was published since it was last taken."""
        return self._hash_of[page] is not None

    def check(self) -> None:
        """Assert the invariants of the pool itself."""
        assert self.refs[NULL_PAGE] == 0 and NULL_PAGE not in self._free, "the null page is used or free"
        for page in range(1, self.num_pages):
            assert self.refs[page] >= 0, f"page {page} has {self.refs[page]} references"
            free = page in self._free
            assert free == (self.refs[page] == 0), f"page {page} has {self.refs[page]} references, free: {free}"
        assert len(self._free) <= self.num_usable, f"{len(self._free)} free pages of {self.num_usable}"
        for page_hash, page in self._page_of.items():
            assert self._hash_of[page] == page_hash, f"page {page} is found by a hash it does not have"


# CacheKind: the interface between the cache manager and the cache of one group of layers.
#
# A new kind of cache (for example a recurrent state with checkpoints) is a new file with a class of this shape, a spec
# in `cache_spec.py` and an entry in `KINDS` in `manager.py`. The manager asks every group the same questions, and
# changes nothing before all groups have agreed.
#
# Entry n of a request's page table is the page of its n-th `page_size` positions. An entry whose page the request no
# longer holds has the null page.

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


# WindowCache: the cache of layers with sliding-window attention. A request gives back the pages before its window.


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


# Groups the cache sites of a model. Each group has its own pages; `config/cache_size.py` says how many.


def group_sites(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Sites of one spec form a group; groups are in the order of their first sites. `specs` is indexed by site."""
    sites_of: dict[CacheSpec, list[int]] = {}
    for site, spec in enumerate(specs):
        sites_of.setdefault(spec, []).append(site)
    return tuple(CacheGroup(spec, tuple(sites)) for spec, sites in sites_of.items())
