"""PagePool: reference counts of the pages of one group, and the hashes by which their content is found.

When the last request that holds a page releases it, the page becomes free but keeps its content and its hash. A later
request can find it again until the page is taken for other content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from slipstream.contracts.request import NEVER
from slipstream.contracts.step import NULL_PAGE


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
        """Add a holder to each of these pages, free or held."""
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

    def num_held_once(self, pages: Sequence[int]) -> int:
        """How many of these pages would be free with one holder less."""
        refs = self.refs
        return sum(1 for page in pages if refs[page] == 1)

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make held pages findable by hash. A hash that another page has already keeps that page. Null pages are
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
        assert self.refs[NULL_PAGE] == 0 and NULL_PAGE not in self._free, "the null page is held or free"
        for page in range(1, self.num_pages):
            assert self.refs[page] >= 0, f"page {page} has {self.refs[page]} references"
            free = page in self._free
            assert free == (self.refs[page] == 0), f"page {page} has {self.refs[page]} references, free: {free}"
        assert len(self._free) <= self.num_usable, f"{len(self._free)} free pages of {self.num_usable}"
        for page_hash, page in self._page_of.items():
            assert self._hash_of[page] == page_hash, f"page {page} is found by a hash it does not have"
