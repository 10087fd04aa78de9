"""CacheManager: the pages of every request over all groups.

`match` looks, `reserve` takes, `publish` shares, `release` gives back. It knows requests and pages; it knows nothing
of steps, rows or budgets. A request's own notes (`pages`, `capacity`, `hashes`, `num_published`) are written here only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config.config import CacheConfig
from slipstream.request import NEVER, Request
from slipstream.scheduler.cache.groups import make_group
from slipstream.scheduler.cache.hashing import extend_hashes

PUBLISH_PAGES = 4  # generated pages published at once: few, so that a row's turn is short, but not singly

Added = tuple[int, list[int]]
"""What one group added to a request: the place of the first page in its table, and the pages."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The part of a newcomer's tokens whose cache content exists already."""

    length: int  # positions
    pages: Sequence[list[int]]  # per group: whole pages, to be held together with others
    partial: Sequence[int] = ()  # per group, if any: the page that holds the rest, to be copied into the next new page


class CacheManager:
    def __init__(self, config: CacheConfig) -> None:
        for group in config.groups:
            assert group.spec.page_size == config.page_size, (
                f"layers {group.layers} have pages of {group.spec.page_size} positions, the cache {config.page_size}"
            )
        self.page_size = config.page_size
        self.prefix_caching = config.prefix_caching
        self.groups = tuple(make_group(group.spec, config.num_pages) for group in config.groups)
        self.num_queries = 0  # tokens of requests admitted for the first time
        self.num_hits = 0  # of those, tokens found in the cache
        self.nothing = Hit(0, [[] for _ in self.groups])
        self._holders: set[Request] = set()

    @property
    def num_free(self) -> int:
        """Free pages of the group that has fewest."""
        return min((group.pool.num_free for group in self.groups), default=NEVER)

    @property
    def num_usable(self) -> int:
        return min((group.pool.num_usable for group in self.groups), default=NEVER)

    def pages_for(self, length: int) -> int:
        """Pages a request of this length holds in the group that needs most."""
        return max((group.pages_for(length) for group in self.groups), default=0)

    def places_for(self, length: int) -> int:
        """The same over all groups: entries in page tables."""
        return sum(group.pages_for(length) for group in self.groups)

    def can_ever_fit(self, length: int) -> bool:
        """Whether one request of this length fits when it has the cache to itself."""
        return all(group.pages_for(length) <= group.pool.num_usable for group in self.groups)

    def match(self, request: Request) -> Hit:
        """The longest prefix that all groups agree on. At least one token is left to compute, to have logits."""
        if not self.prefix_caching or not self.groups:
            return self.nothing
        tokens, hashes, page_size, salt = request.tokens, request.hashes, self.page_size, request.cache_salt
        limit = (len(tokens) - 1) // page_size

        def hash_at(place: int) -> bytes:
            if place >= len(hashes):
                # some ahead, not all: a long prompt that misses early need not be hashed in one go
                extend_hashes(hashes, tokens, min(limit, place + 16), page_size, salt)
            return hashes[place]

        while True:
            found = [group.match(hash_at, limit) for group in self.groups]
            agreed = min(map(len, found))
            if all(len(pages) == agreed for pages in found):
                return Hit(agreed * page_size, found)
            limit = agreed

    def fork(self, request: Request, leader: Request) -> Hit:
        """All but the last token of a running leader's prompt, for another sample of it.

        Whole pages are shared. The page that holds the last token is copied, unless that token is its first: from
        there on every sample writes its own. Works without prefix caching too.
        """
        length = leader.num_prompt - 1
        whole, rest = divmod(length, self.page_size)
        request.hashes = leader.hashes[:whole]  # the same tokens
        pages = [held[:whole] for held in leader.pages]
        return Hit(length, pages, [held[whole] for held in leader.pages] if rest else ())

    def reserve(self, request: Request, length: int, hit: Hit | None = None, keep: int = 0) -> list[Added] | None:
        """Give the request the pages for `length` positions; None, and nothing has changed, if they are not there.

        A newcomer comes with its hit and holds those pages from here on. `keep` pages of each group stay free.
        """
        if hit is not None:
            return self._seat(request, length, hit, keep)
        held_by = request.pages
        for index, group in enumerate(self.groups):
            if group.pages_for(length) - len(held_by[index]) > group.pool.num_free - keep:
                return None
        added = []
        capacity = NEVER
        for index, group in enumerate(self.groups):
            held = held_by[index]
            place = len(held)
            pages = group.pool.take(group.pages_for(length) - place)
            held += pages
            added.append((place, pages))
            capacity = min(capacity, group.positions_in(len(held)))
        request.capacity = capacity
        return added

    def _seat(self, request: Request, length: int, hit: Hit, keep: int) -> list[Added] | None:
        assert not request.pages, f"{request} holds pages already"
        for group, shared in zip(self.groups, hit.pages, strict=True):
            need = group.pages_for(length) - len(shared)
            if need > group.pool.num_free - group.pool.num_idle(shared) - keep:
                return None
        if not request.num_preemptions and self.prefix_caching:
            self.num_queries += len(request.tokens)
            self.num_hits += hit.length
        added = []
        capacity = NEVER
        for group, shared in zip(self.groups, hit.pages, strict=True):
            group.pool.share(shared)  # before taking, which could take these very pages
            pages = shared + group.pool.take(group.pages_for(length) - len(shared))
            request.pages.append(pages)
            added.append((0, list(pages)))
            capacity = min(capacity, group.positions_in(len(pages)))
        self._holders.add(request)
        request.num_published = len(hit.pages[0]) if self.groups else 0
        request.capacity = capacity
        self._set_mark(request)
        return added

    def publish(self, request: Request) -> None:
        """Let others find the pages that lie wholly inside what is both known and launched."""
        if not self.prefix_caching or not self.groups:
            return
        full = min(len(request.tokens), request.computed) // self.page_size
        if full <= request.num_published:
            return
        extend_hashes(request.hashes, request.tokens, full, self.page_size, request.cache_salt)
        for group, held in zip(self.groups, request.pages, strict=True):
            for place in range(request.num_published, full):
                group.pool.publish(held[place], request.hashes[place])
        request.num_published = full
        self._set_mark(request)

    def release(self, request: Request, *, spoiled: bool = False) -> None:
        """Give back all its pages, published as far as they can be.

        What `spoiled` pages contain shall not be found by anyone again.
        """
        if not spoiled:
            self.publish(request)
        for group, held in zip(self.groups, request.pages, strict=True):
            if spoiled:
                for page in held:
                    group.pool.forget(page)
            group.pool.release(held)
        self._holders.discard(request)
        request.pages = []
        request.capacity = 0
        request.num_published = 0
        request.publish_after = NEVER

    def _set_mark(self, request: Request) -> None:
        # the last known token may not have been launched, so a page counts once the token after it is known
        if self.prefix_caching:
            request.publish_after = (request.num_published + PUBLISH_PAGES) * self.page_size

    def check(self) -> None:
        """Assert every invariant; for tests, as it walks over all pages."""
        for index, group in enumerate(self.groups):
            pool = group.pool
            pool.check()
            holders: Counter[int] = Counter()
            places: dict[int, set[tuple[str, int]]] = {}
            for request in self._holders:
                held = request.pages[index]
                assert len(set(held)) == len(held), f"{request} holds a page twice: {held}"
                for place, page in enumerate(held):
                    holders[page] += 1
                    places.setdefault(page, set()).add((request.id, place))
                assert request.num_published <= len(held), f"{request} published {request.num_published} of {len(held)}"
                assert group.positions_in(len(held)) >= request.capacity, f"{request} thinks it has more room"
                assert request.computed <= request.capacity, f"{request} computed past its {request.capacity} positions"
            for page in range(1, pool.num_pages):
                assert pool.refs[page] == holders[page], (
                    f"page {page} of group {index}: {pool.refs[page]} refs, {holders[page]} holders"
                )
                if holders[page] > 1 and not pool.is_published(page):
                    assert len(places[page]) == 1, f"page {page} is shared by strangers: {places[page]}"
