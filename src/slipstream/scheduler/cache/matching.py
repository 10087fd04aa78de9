"""Matching: the longest cached prefix of one request, found once and updated while the request waits.

Every plan looks at the first request of the queue, and matching a long cached prompt takes milliseconds. So a request
that is blocked there keeps its match. A match is a function of the answers of the page pools for the request's page
hashes. The pools watch these hashes and record the first one whose answer has changed: its page was taken or
unpublished, or a page was published under it. Without a change the match is still valid. With one, a group matches
again from the changed page on.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.request import NEVER, Request
from slipstream.scheduler.cache.hashing import extend_hashes
from slipstream.scheduler.cache.kind import CacheKind
from slipstream.scheduler.cache.paged import held_pages

_HASH_AHEAD = 16  # pages: a long prompt that misses early is not hashed as a whole


class Matching:
    __slots__ = ("request", "is_kept", "pages", "_groups", "_order", "_page_size", "_num_tokens", "_found", "_spare")

    def __init__(self, request: Request, groups: Sequence[CacheKind], order: Sequence[int], page_size: int) -> None:
        """`order`: the indices of the groups, those that need the most pages first."""
        self.request = request
        self.is_kept = False
        self._groups = groups
        self._order = order
        self._page_size = page_size
        self._num_tokens = len(request.tokens)
        # per group: the limit of its first match, and what it found
        self._found: list[tuple[int, list[int]] | None] = [None] * len(groups)
        # per group: an upper bound of the free pages outside the match, less the pool's `num_freed` at that time
        self._spare = [NEVER] * len(groups)
        self.pages = self._match([0] * len(groups))

    def is_of(self, request: Request) -> bool:
        """Whether the match was kept for this request, with the tokens that the request has now."""
        return self.is_kept and self.request is request and self._num_tokens == len(request.tokens)

    def keep(self) -> None:
        """Watch for changes from now on. Nothing may have changed since the match."""
        self.is_kept = True
        for group in self._groups:
            group.pool.watch(self.request.hashes)

    def drop(self) -> None:
        self.is_kept = False
        for group in self._groups:
            group.pool.watch(())

    def refresh(self) -> Sequence[list[int]]:
        """Per group, the pages of the current match."""
        changed = [group.pool.take_changed() for group in self._groups]
        if min(changed) == NEVER:
            return self.pages
        if len(self._groups) == 1 and self._groups[0].keeps_all:
            # pages that are no longer part of the match may be free now
            self._spare[0] = min(NEVER, self._spare[0] + max(0, len(self.pages[0]) - changed[0]))
        else:
            self._spare = [NEVER] * len(self._groups)
        num_hashes = len(self.request.hashes)
        self.pages = self._match(changed)
        if len(self.request.hashes) > num_hashes:
            self.keep()
        return self.pages

    def lacks(self, index: int, num_pages: int) -> bool:
        """Whether a group certainly has fewer free pages than this outside the match."""
        pool = self._groups[index].pool
        return num_pages > self._spare[index] + pool.num_freed

    def set_spare(self, index: int, num_pages: int) -> None:
        """Record how many pages of a group are free outside the match."""
        self._spare[index] = num_pages - self._groups[index].pool.num_freed

    def check(self) -> None:
        """Assert that the kept match is what a match from the beginning finds. For tests."""
        request = self.request
        if len(request.tokens) != self._num_tokens:
            return
        kept = self.refresh()
        fresh = Matching(request, self._groups, self._order, self._page_size).pages
        assert list(kept) == list(fresh), f"{request} keeps the match {kept}, and {fresh} is in the cache"
        for group, pages, spare in zip(self._groups, kept, self._spare, strict=True):
            outside = group.pool.num_free - group.pool.num_idle(held_pages(pages))
            assert outside <= spare + group.pool.num_freed, f"{outside} pages are free outside the match of {request}"

    def _match(self, changed: Sequence[int]) -> list[list[int]]:
        """`changed`: per group, the first page whose answer may have changed."""
        limit = (self._num_tokens - 1) // self._page_size  # at least one token is left to compute
        found: list[list[int]] = [[] for _ in self._groups]
        is_first = True
        while True:
            agreed = limit
            for index in self._order:
                if is_first:
                    found[index] = self._match_group(index, agreed, changed[index])
                else:
                    found[index] = self._groups[index].match(self._hash_at, agreed, found[index][:agreed])
                agreed = len(found[index])
            if all(len(pages) == agreed for pages in found):
                return found
            limit, is_first = agreed, False

    def _match_group(self, index: int, limit: int, changed: int) -> list[int]:
        known: list[int] = []
        if (last := self._found[index]) is not None:
            last_limit, known = last
            # without a change, the longest match within a larger limit is also the longest within this one
            if changed == NEVER and len(known) <= limit <= last_limit:
                return known
        pages = self._groups[index].match(self._hash_at, limit, known[: min(changed, limit)])
        self._found[index] = limit, pages
        return pages

    def _hash_at(self, entry: int) -> bytes:
        request = self.request
        if entry >= len(request.hashes):
            full = len(request.tokens) // self._page_size
            num = min(full, entry + _HASH_AHEAD)
            extend_hashes(request.hashes, request.tokens, num, self._page_size, request.cache_salt, request.long_rope)
        return request.hashes[entry]
