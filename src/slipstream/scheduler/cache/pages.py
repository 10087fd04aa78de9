"""PagePool: who holds which page of one group, and what the pages nobody holds still contain.

A page is held by as many requests as its count of references says. When the last one lets go the page becomes free
but keeps its content and its hash, so that a later request may find it again, until it is taken for something else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from slipstream.request import NEVER
from slipstream.step import NULL_PAGE


class PagePool:
    """Pages 1 to num_pages - 1; page 0 is the null page and is never handed out."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"a pool of {num_pages} pages has none to hand out beside the null page"
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        # Free pages, the next to be taken first. An OrderedDict also gives up one from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self.num_freed = 0  # pages that have become free so far, each as often as it did
        self._watched: dict[bytes, int] = {}  # hashes and their places
        self._first_changed = NEVER

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def take(self, count: int) -> list[int]:
        """Pages to write into: those whose content was needed longest ago. The content is forgotten here."""
        free, refs, hash_of = self._free, self.refs, self._hash_of
        assert count <= len(free), f"{count} pages taken, {len(free)} are free"
        pages = []
        for _ in range(count):
            page, _none = free.popitem(last=False)
            refs[page] = 1
            if hash_of[page] is not None:
                self.forget(page)
                hash_of[page] = None
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these, free or held."""
        refs = self.refs
        for page in pages:
            if refs[page] == 0:
                del self._free[page]
            refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each. `pages` are in the order of their positions.

        Later pages are useless without the earlier ones, so they become free first and are taken first. A page
        without a hash cannot be found by anyone, so it goes before all that can.
        """
        refs, free, hash_of = self.refs, self._free, self._hash_of
        for page in reversed(pages):
            assert refs[page] > 0, f"page {page} released more often than taken"
            refs[page] -= 1
            if refs[page] == 0:
                free[page] = None
                self.num_freed += 1
                if hash_of[page] is None:
                    free.move_to_end(page, last=False)

    def find(self, page_hash: bytes) -> int | None:
        return self._page_of.get(page_hash)

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of these are free now, and would no longer be once shared."""
        refs = self.refs
        return sum(1 for page in pages if refs[page] == 0)

    def num_held_once(self, pages: Sequence[int]) -> int:
        """How many of these would be free if one holder let go of them."""
        refs = self.refs
        return sum(1 for page in pages if refs[page] == 1)

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Let others find held pages by their content. If another page has that content already, that one stays.
        Places that have the null page are passed over."""
        refs, page_of, hash_of = self.refs, self._page_of, self._hash_of
        for page, page_hash in zip(pages, hashes, strict=True):
            if page != NULL_PAGE and page_hash not in page_of:
                assert refs[page] > 0, f"page {page} published while nobody holds it"
                page_of[page_hash] = page
                hash_of[page] = page_hash
                self._note_change(page_hash)

    def forget(self, page: int) -> None:
        """Let nobody find this page any more; those who hold it keep it."""
        page_hash = self._hash_of[page]
        if page_hash is not None and self._page_of.get(page_hash) == page:
            del self._page_of[page_hash]
            self._note_change(page_hash)

    def watch(self, hashes: Sequence[bytes]) -> None:
        """Note from here on what `find` no longer answers as it does now, for these hashes alone."""
        self._watched = dict(zip(hashes, range(len(hashes)), strict=True))
        self._first_changed = NEVER

    def take_changed(self) -> int:
        """The place of the first watched hash whose answer changed since this was last asked; NEVER if none did."""
        changed, self._first_changed = self._first_changed, NEVER
        return changed

    def _note_change(self, page_hash: bytes) -> None:
        if self._watched and (place := self._watched.get(page_hash, NEVER)) < self._first_changed:
            self._first_changed = place

    def hash_of(self, page: int) -> bytes | None:
        """The hash it was published under since it was last taken."""
        return self._hash_of[page]

    def is_published(self, page: int) -> bool:
        """Whether it was, since it was last taken."""
        return self._hash_of[page] is not None

    def check(self) -> None:
        """Assert what must always hold of the pool by itself."""
        assert self.refs[NULL_PAGE] == 0 and NULL_PAGE not in self._free, "the null page was handed out"
        for page in range(1, self.num_pages):
            assert self.refs[page] >= 0, f"page {page} has {self.refs[page]} references"
            free = page in self._free
            assert free == (self.refs[page] == 0), f"page {page} has {self.refs[page]} references, free: {free}"
        assert len(self._free) <= self.num_usable, f"{len(self._free)} free pages of {self.num_usable}"
        for page_hash, page in self._page_of.items():
            assert self._hash_of[page] == page_hash, f"page {page} is found by a hash it does not have"
