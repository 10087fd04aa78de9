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
from slipstream.scheduler.cache.groups import FullGroup, Group, make_group
from slipstream.scheduler.cache.hashing import extend_hashes
from slipstream.scheduler.cache.matching import Matching
from slipstream.step import NULL_PAGE

PUBLISH_PAGES = 4  # generated pages published at once: few, so that a row's turn is short, but not singly

Run = tuple[int, int, list[int]]
"""Neighbouring places of a request's table that have changed: the group, the first place, its page and those after."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The part of a newcomer's tokens whose cache content exists already."""

    length: int  # positions
    pages: Sequence[list[int]]  # per group: whole pages, to be held together with others; the null page if not needed
    partial: Sequence[int] = ()  # per group, if any: the page that holds the rest, to be copied into the next new page


class CacheManager:
    def __init__(self, config: CacheConfig) -> None:
        for group in config.groups:
            assert group.spec.page_size == config.page_size, (
                f"layers {group.layers} have pages of {group.spec.page_size} positions, the cache {config.page_size}"
            )
        self.page_size = config.page_size
        self.prefix_caching = config.prefix_caching
        self.groups = tuple(
            make_group(group.spec, num_pages, config.step_tokens)
            for group, num_pages in zip(config.groups, config.group_pages, strict=True)
        )
        # those that need the most come first: what they do not have need not be looked for in the others
        self._by_need = sorted(range(len(self.groups)), key=lambda n: not isinstance(self.groups[n], FullGroup))
        self.forgets = any(not isinstance(group, FullGroup) for group in self.groups)
        self.num_queries = 0  # tokens of requests admitted for the first time
        self.num_hits = 0  # of those, tokens found in the cache
        self.nothing = Hit(0, [[] for _ in self.groups])
        self._matching: Matching | None = None  # of the request that was matched last
        self._holders: set[Request] = set()

    @property
    def num_free(self) -> int:
        """Free pages of the group that has fewest."""
        return min([group.pool.num_free for group in self.groups], default=NEVER)

    @property
    def num_usable(self) -> int:
        return min((group.pool.num_usable for group in self.groups), default=NEVER)

    def pages_for(self, length: int) -> int:
        """Pages a request of this length holds at once in the group that needs most."""
        return max((group.pages_for(length) for group in self.groups), default=0)

    def places_for(self, length: int) -> int:
        """Entries in the page tables of all groups."""
        return len(self.groups) * -(-length // self.page_size)

    def can_ever_fit(self, length: int) -> bool:
        """Whether one request of this length fits when it has the cache to itself."""
        return all(group.pages_for(length) <= group.pool.num_usable for group in self.groups)

    def match(self, request: Request) -> Hit:
        """The longest prefix that all groups agree on. At least one token is left to compute, to have logits."""
        if not self.prefix_caching or not self.groups:
            return self.nothing
        matching = self._matching
        if matching is not None and matching.is_of(request):
            pages = matching.refresh()
        else:
            self._drop_match()
            self._matching = matching = Matching(request, self.groups, self._by_need, self.page_size)
            pages = matching.pages
        return Hit(len(pages[0]) * self.page_size, pages) if pages[0] else self.nothing

    def keep_match(self, request: Request) -> None:
        """The request that was matched last has to wait: the next match of it costs only what has changed by then."""
        matching = self._matching
        if matching is not None and matching.request is request and not matching.is_kept:
            matching.keep()

    def drop_match(self, request: Request) -> None:
        """Another match of this request will not be asked for."""
        if self._matching is not None and self._matching.request is request:
            self._drop_match()

    def _drop_match(self) -> None:
        if self._matching is not None and self._matching.is_kept:
            self._matching.drop()
        self._matching = None

    def fork(self, request: Request, leader: Request) -> Hit | None:
        """All but the last token of a running leader's prompt, for another sample of it.

        Whole pages are shared. The page that holds the last token is copied, unless that token is its first: from
        there on every sample writes its own. Works without prefix caching too. None if the leader has run on and given
        back pages that the sample would need.
        """
        length = leader.num_prompt - 1
        whole, rest = divmod(length, self.page_size)
        pages = []
        for group, held in zip(self.groups, leader.pages, strict=True):
            first = group.first_needed(length)
            if NULL_PAGE in held[first : whole + bool(rest)]:
                return None
            pages.append([NULL_PAGE] * first + held[first:whole])
        request.hashes = leader.hashes[:whole]  # the same tokens
        return Hit(length, pages, [held[whole] for held in leader.pages] if rest else ())

    def reserve(
        self, request: Request, length: int, hit: Hit | None = None, keep: int = 0, known: int = 0
    ) -> list[Run] | None:
        """Give the request the pages for `length` positions; None, and nothing has changed, if they are not there.

        Pages that nothing will read again are given back first: those before the window of what is committed, since a
        step in flight may still read what lies before the launched length. A newcomer comes with its hit and holds
        those pages from here on; there must be room for all its `known` positions, and `keep` pages of each group
        stay free.
        """
        if hit is not None:
            return self._seat(request, length, hit, keep, known)
        num_places = -(-length // self.page_size)
        if not self.forgets:
            return self._grow(request, num_places, keep)
        unneeded = [self._unneeded(request, index, group) for index, group in enumerate(self.groups)]
        for group, held, (_, old) in zip(self.groups, request.pages, unneeded, strict=True):
            if num_places - len(held) > group.pool.num_free + group.pool.num_held_once(old) - keep:
                return None
        if any(old for _, old in unneeded):
            self.publish(request)  # what is given back may still be found
        changed: list[Run] = []
        for index, (group, held, (first, old)) in enumerate(zip(self.groups, request.pages, unneeded, strict=True)):
            if old:
                group.pool.release(old[::-1])  # the earliest are taken for something else first
                held[first : first + len(old)] = [NULL_PAGE] * len(old)
                changed.append((index, first, [NULL_PAGE] * len(old)))
            if num_places > len(held):
                pages = group.pool.take(num_places - len(held))
                changed.append((index, len(held), pages))
                held += pages
        request.capacity = num_places * self.page_size if self.groups else NEVER
        return changed

    def _grow(self, request: Request, num_places: int, keep: int) -> list[Run] | None:
        """The same where no group gives pages back. Rows that began together all come here in the same step."""
        held_by_group = request.pages
        for group, held in zip(self.groups, held_by_group, strict=True):
            if num_places - len(held) > group.pool.num_free - keep:
                return None
        changed: list[Run] = []
        for index, held in enumerate(held_by_group):
            if num_places > len(held):
                pages = self.groups[index].pool.take(num_places - len(held))
                changed.append((index, len(held), pages))
                held += pages
        request.capacity = num_places * self.page_size if held_by_group else NEVER
        return changed

    def _unneeded(self, request: Request, index: int, group: Group) -> tuple[int, list[int]]:
        """The pages that nothing will read again, and the place of the first."""
        held = request.pages[index]
        stop = group.first_needed(request.num_committed)
        first = stop
        while first and held[first - 1] != NULL_PAGE:
            first -= 1
        return first, held[first:stop]

    def will_give_back(self, request: Request) -> bool:
        """Whether steps in flight keep pages of it from being given back."""
        launched, committed = request.computed, request.num_committed
        return any(group.first_needed(launched) > group.first_needed(committed) for group in self.groups)

    def _seat(self, request: Request, length: int, hit: Hit, keep: int, known: int) -> list[Run] | None:
        assert not request.pages, f"{request} holds pages already"
        num_places = -(-length // self.page_size)
        if not all(self._has_room(index, hit, num_places, keep, known) for index in range(len(self.groups))):
            return None
        self.drop_match(request)
        if not request.num_preemptions and self.prefix_caching:
            self.num_queries += len(request.tokens)
            self.num_hits += hit.length
        changed: list[Run] = []
        for index, (group, shared) in enumerate(zip(self.groups, hit.pages, strict=True)):
            if shared:
                group.pool.share(_real(shared))  # before taking, which could take these very pages
            pages = shared + group.pool.take(num_places - len(shared))
            request.pages.append(pages)
            changed.append((index, 0, pages[:]))
        self._holders.add(request)
        request.num_published = len(hit.pages[0]) if self.groups else 0
        request.capacity = num_places * self.page_size if self.groups else NEVER
        self._set_mark(request)
        return changed

    def _has_room(self, index: int, hit: Hit, num_places: int, keep: int, known: int) -> bool:
        """Whether a group can seat a newcomer."""
        group, shared = self.groups[index], hit.pages[index]
        first = group.first_needed(hit.length)  # of the shared pages; the null page stands before it
        need = keep + max(num_places - len(shared), group.pages_for(known) - (len(shared) - first))
        if not shared or need > group.pool.num_free:
            return need <= group.pool.num_free
        matching = self._matching if self._matching is not None and self._matching.pages is hit.pages else None
        if matching is not None and matching.lacks(index, need):
            return False
        # shared pages that are free now will not be free for others
        num_spare = group.pool.num_free - group.pool.num_idle(shared[first:])
        if matching is not None:
            matching.set_spare(index, num_spare)
        return need <= num_spare

    def publish(self, request: Request) -> None:
        """Let others find the pages that lie wholly inside what is both known and launched."""
        if not self.prefix_caching or not self.groups:
            return
        full = min(len(request.tokens), request.computed) // self.page_size
        if full <= request.num_published:
            return
        extend_hashes(request.hashes, request.tokens, full, self.page_size, request.cache_salt, request.long_rope)
        new = slice(request.num_published, full)
        for group, held in zip(self.groups, request.pages, strict=True):
            group.pool.publish(held[new], request.hashes[new])
        request.num_published = full
        self._set_mark(request)

    def release(self, request: Request) -> None:
        """Give back all its pages, published as far as they can be."""
        self.publish(request)
        for group, places in zip(self.groups, request.pages, strict=True):
            group.pool.release(_real(places))
        self._holders.discard(request)
        request.pages = []
        request.capacity = 0
        request.num_published = 0
        request.publish_after = NEVER

    def forget(self, request: Request) -> None:
        """Let nobody find what a request has published, whether it holds those pages or has given them back."""
        for group in self.groups:
            for page_hash in request.hashes:
                page = group.pool.find(page_hash)
                if page is not None:
                    group.pool.forget(page)

    def _set_mark(self, request: Request) -> None:
        # the last known token may not have been launched, so a page counts once the token after it is known; and rows
        # that began together need not all have their turn in the same step
        if self.prefix_caching:
            turn = request.number % self.page_size
            request.publish_after = (request.num_published + PUBLISH_PAGES) * self.page_size + turn

    def check(self) -> None:
        """Assert every invariant; for tests, as it walks over all pages."""
        if self._matching is not None and self._matching.is_kept:
            self._matching.check()
        for index, group in enumerate(self.groups):
            pool = group.pool
            pool.check()
            holders: Counter[int] = Counter()
            places: dict[int, set[tuple[str, int]]] = {}
            for request in self._holders:
                held = request.pages[index]
                needed = held[group.first_needed(request.num_committed) :]
                assert NULL_PAGE not in needed, f"{request} gave back a page it needs: {held}"
                assert len(set(_real(held))) == len(_real(held)), f"{request} holds a page twice: {held}"
                for place, page in enumerate(held):
                    if page != NULL_PAGE:
                        holders[page] += 1
                        places.setdefault(page, set()).add((request.id, place))
                self._check_hashes(request, index, held)
                assert request.num_published <= len(held), f"{request} published {request.num_published} of {len(held)}"
                assert len(held) * self.page_size >= request.capacity, f"{request} thinks it has more room"
                assert request.computed <= request.capacity, f"{request} computed past its {request.capacity} positions"
            for page in range(1, pool.num_pages):
                assert pool.refs[page] == holders[page], (
                    f"page {page} of group {index}: {pool.refs[page]} refs, {holders[page]} holders"
                )
                if holders[page] > 1 and not pool.is_published(page):
                    assert len(places[page]) == 1, f"page {page} is shared by strangers: {places[page]}"

    def _check_hashes(self, request: Request, index: int, held: list[int]) -> None:
        """Every published page that it holds is found by the hash of its own tokens, all of which are known."""
        named = [self.groups[index].pool.hash_of(page) for page in held]
        hashes: list[bytes] = []
        full = len(request.tokens) // self.page_size
        extend_hashes(hashes, request.tokens, full, self.page_size, request.cache_salt, request.long_rope)
        for place, (page, name) in enumerate(zip(held, named, strict=True)):
            if page != NULL_PAGE and name is not None:
                assert place < len(hashes), f"page {page} of {request} is published, and not all its tokens are known"
                assert name == hashes[place], f"page {page} of {request} is published under the hash of other tokens"


def _real(places: list[int]) -> list[int]:
    """The pages among them, without the null page."""
    return [page for page in places if page != NULL_PAGE]
