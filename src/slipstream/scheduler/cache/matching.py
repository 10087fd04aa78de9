"""Matching: the longest cached prefix of one request, found once and updated while the request waits.

Every plan looks at the first request of the queue, and matching a long cached prompt takes milliseconds. So a request
that is blocked there keeps its match. A match is a function of the answers of the page pools for the request's page
hashes. The pools watch these hashes and record the first one whose answer has changed: its page was taken or
unpublished, or a page was published under it. Without a change the match is still valid. With one, a group matches
again from the changed page on.

A model with recurrent states can only continue from a checkpoint: then the match ends at the last checkpoint within the
pages that all groups have.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from slipstream.contracts.images import PromptImages
from slipstream.contracts.request import NEVER, Request
from slipstream.scheduler.cache.pages import CacheKind, real_pages
from slipstream.scheduler.cache.states import StateCache

_HASH_AHEAD = 16  # pages: a long prompt that misses early is not hashed as a whole


class Matching:
    __slots__ = (
        "request", "is_kept", "is_fetched", "pages", "num_pages", "branch", "checkpoint", "_groups", "_order",
        "_page_size", "_states", "_num_tokens", "_found", "_spare", "_version", "_drops_last", "_following",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        groups: Sequence[CacheKind],
        order: Sequence[int],
        page_size: int,
        states: StateCache | None = None,
        drops_last: bool = False,
        following: int = 0,
    ) -> None:
        """`order`: the indices of the groups, those that need the most pages first; `drops_last`: the match is one page
        shorter than what is cached; `following`: as in `extend_hashes`."""
        self.request = request
        self.is_kept = False
        self.is_fetched = False  # the second tier has no more pages for this request
        self.num_pages = 0  # length of the match
        self.branch = 0  # pages that all groups have, whether or not there is a checkpoint
        self.checkpoint = -1  # to continue from, if the model has recurrent states
        self._states = states
        self._version = 0 if states is None else states.version
        self._groups = groups
        self._order = order
        self._page_size = page_size
        self._drops_last = drops_last
        self._following = following
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
        version = 0 if self._states is None else self._states.version
        if min(changed, default=NEVER) == NEVER and version == self._version:
            return self.pages
        self._version = version
        if self._states is None and len(self._groups) == 1 and self._groups[0].keeps_all:
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
        others = self._states, self._drops_last, self._following
        fresh = Matching(request, self._groups, self._order, self._page_size, *others)
        assert list(kept) == list(fresh.pages), f"{request} keeps the match {kept}, and {fresh.pages} is in the cache"
        assert (self.num_pages, self.branch, self.checkpoint) == (fresh.num_pages, fresh.branch, fresh.checkpoint)
        for group, pages, spare in zip(self._groups, kept, self._spare, strict=True):
            outside = group.pool.num_free - group.pool.num_idle(real_pages(pages))
            assert outside <= spare + group.pool.num_freed, f"{outside} pages are free outside the match of {request}"

    def _match(self, changed: Sequence[int]) -> list[list[int]]:
        """`changed`: per group, the first page whose answer may have changed."""
        limit = (self._num_tokens - 1) // self._page_size  # at least one token is left to compute
        found: list[list[int]] = [[] for _ in self._groups]
        self.branch, self.checkpoint = 0, -1
        is_first, drops_last = True, self._drops_last
        while True:
            agreed = limit
            for index in self._order:
                if is_first:
                    found[index] = self._match_group(index, agreed, changed[index])
                else:
                    found[index] = self._groups[index].match(self.hash_at, agreed, found[index][:agreed])
                agreed = len(found[index])
            if all(len(pages) == agreed for pages in found):
                if drops_last and agreed:
                    limit, is_first, drops_last = agreed - 1, False, False
                    continue
                self.num_pages = agreed
                if self._states is None or not agreed:
                    return found
                self.branch = self.branch or agreed
                limit, self.checkpoint = self._states.longest(self.hash_at, agreed)
                if limit == agreed:
                    return found
                agreed = limit
            limit, is_first = agreed, False

    def _match_group(self, index: int, limit: int, changed: int) -> list[int]:
        known: list[int] = []
        if (last := self._found[index]) is not None:
            last_limit, known = last
            # without a change, the longest match within a larger limit is also the longest within this one
            if changed == NEVER and len(known) <= limit <= last_limit:
                return known
        pages = self._groups[index].match(self.hash_at, limit, known[: min(changed, limit)])
        self._found[index] = limit, pages
        return pages

    def hash_at(self, entry: int) -> bytes:
        """The hash of the request's page of this entry, computed on first use."""
        request = self.request
        if entry >= len(request.hashes):
            full = (len(request.tokens) - self._following) // self._page_size
            num = min(full, entry + _HASH_AHEAD)
            extend_hashes_of(request.hashes, request, num, self._page_size, self._following)
        return request.hashes[entry]


# Chained page hashes: the hash of a page covers its tokens and the hash of the page before it.
#
# Equal hashes mean equal tokens from the first position on, hence equal cache content. The chain begins with the cache
# salt, so requests with different salts share nothing. Keys rotated by LongRoPE's long factors differ from keys rotated
# by the short factors, so the two have different hashes too; and so have keys computed with different adapters. All
# tokens of images are the same, so a page that shows an image also covers the image's key and where it is in the image.
#
# A draft head that reads hidden states computes the entry of a position from the token after it too. With such a head
# the hash of a page also covers the token after the page (`following`).

DIGEST_BYTES = 16
_TOKEN_BYTES = array("i").itemsize


def extend_hashes(
    hashes: list[bytes],
    tokens: list[int],
    num_pages: int,
    page_size: int,
    salt: str,
    long_rope: bool = False,
    adapter: bytes = b"",
    following: int = 0,
    images: PromptImages | None = None,
) -> None:
    """Append hashes until there are `num_pages`. Reads the tokens of the new pages only. `adapter`: digest of the LoRA
    adapter; empty: none. `following`: tokens after a page that its hash covers, 0 or 1. `images`: of the prompt."""
    first = len(hashes)
    if first >= num_pages:
        return
    needed = num_pages * page_size + following
    assert needed <= len(tokens), f"{len(tokens)} tokens, but {num_pages} hashes of {page_size} need {needed}"
    parent = hashes[-1] if first else _root(salt, long_rope, adapter)
    content = array("i", tokens[first * page_size : needed]).tobytes()
    width, covered = page_size * _TOKEN_BYTES, (page_size + following) * _TOKEN_BYTES
    marks = {} if images is None else images.page_marks(first, num_pages, page_size, following)
    for page, start in enumerate(range(0, (num_pages - first) * width, width), first):
        shown = content[start : start + covered] + marks.get(page, b"") if marks else content[start : start + covered]
        parent = blake2b(parent + shown, digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)


def extend_hashes_of(hashes: list[bytes], request: Request, num_pages: int, page_size: int, following: int) -> None:
    """Append hashes of a request's pages until there are `num_pages`."""
    key, images = request.cache_key, request.images
    extend_hashes(hashes, request.tokens, num_pages, page_size, *key, following=following, images=images)


@lru_cache(64)
def _root(salt: str, long_rope: bool, adapter: bytes) -> bytes:
    person = b"long rope" if long_rope else b""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=person, key=adapter).digest()
