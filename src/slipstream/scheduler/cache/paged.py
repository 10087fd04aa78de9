"""PagedCache: the cache of layers that read every earlier position. A request keeps its pages until it is released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slipstream.contracts.cache_spec import PagedSpec
from slipstream.contracts.request import Request
from slipstream.contracts.step import NULL_PAGE
from slipstream.scheduler.cache.kind import Find, HashAt, Run
from slipstream.scheduler.cache.pages import PagePool


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
            self.pool.share(held_pages(pages))
        request.pages.append(list(pages))

    def can_reserve(self, request: Request, num_entries: int, unneeded: Sequence[int] = ()) -> bool:
        num_free = self.pool.num_free + (self.pool.num_held_once(unneeded) if unneeded else 0)
        return num_entries - len(request.pages[self.index]) <= num_free

    def reserve(self, request: Request, num_entries: int) -> Run | None:
        held = request.pages[self.index]
        first = len(held)
        if num_entries <= first:
            return None
        pages = self.pool.take(num_entries - first)
        held += pages
        return self.index, first, pages

    def unneeded(self, request: Request) -> Run:
        """Steps in flight may read what the launched length no longer needs, so the committed length decides."""
        held = request.pages[self.index]
        stop = self.first_needed(request.num_committed)
        first = stop
        while first and held[first - 1] != NULL_PAGE:
            first -= 1
        return self.index, first, held[first:stop]

    def publish(self, request: Request, new: slice) -> None:
        self.pool.publish(request.pages[self.index][new], request.hashes[new])

    def release(self, request: Request, unneeded: Run | None = None) -> None:
        held = request.pages[self.index]
        if unneeded is None:
            self.pool.release(held_pages(held))
            held.clear()
            return
        _, first, pages = unneeded
        self.pool.release(pages[::-1])  # so that the pages of the earliest positions are reused first
        held[first : first + len(pages)] = [NULL_PAGE] * len(pages)

    def check(self, requests: Iterable[Request]) -> None:
        pool = self.pool
        pool.check()
        holders: Counter[int] = Counter()
        users: dict[int, set[tuple[str, int]]] = {}  # by page: request ids and entries
        for request in requests:
            held = request.pages[self.index]
            pages = held_pages(held)
            assert NULL_PAGE not in held[self.first_needed(request.num_committed) :], f"{request} lacks a page: {held}"
            assert len(set(pages)) == len(pages), f"{request} holds a page twice: {held}"
            holders.update(pages)
            for entry, page in enumerate(held):
                users.setdefault(page, set()).add((request.id, entry))
            assert request.num_published <= len(held), f"{request} published {request.num_published} of {len(held)}"
            assert len(held) * self.page_size >= request.capacity, f"{request} has fewer pages than its capacity"
            assert request.computed <= request.capacity, f"{request} computed past its {request.capacity} positions"
        for page in range(1, pool.num_pages):
            assert pool.refs[page] == holders[page], (
                f"page {page} of group {self.index}: {pool.refs[page]} references, {holders[page]} holders"
            )
            if holders[page] > 1 and not pool.is_published(page):
                assert len(users[page]) == 1, f"page {page} is unpublished and shared by {users[page]}"


def held_pages(entries: Sequence[int]) -> list[int]:
    """The pages among these entries, without the null page."""
    return [page for page in entries if page != NULL_PAGE]
