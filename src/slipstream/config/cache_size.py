"""Computes how many pages each cache group gets.

A group that keeps every position can use any number of pages. In a group with a window, running requests never hold
more than their windows and the positions of a step; some more windows make cached prefixes of earlier requests usable.
The rest goes to the groups that keep every position.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.cache_spec import CacheGroup, WindowSpec

MIN_PREFIXES = 16


class CacheSize:
    """A cache for `max_num_seqs` requests of up to `length` positions. Page counts include the null page."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        length: int,
        max_num_seqs: int,
        step_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        self.groups = groups
        self.length = length
        self.step_tokens = step_tokens
        # per group: the pages that it needs if all requests have their full length
        num_prefixes = max(max_num_seqs, MIN_PREFIXES) if prefix_caching else 0
        self._enough = [self._enough_for(group, max_num_seqs, num_prefixes) for group in groups]
        self._keeps = [not isinstance(group.spec, WindowSpec) for group in groups]

    def _enough_for(self, group: CacheGroup, max_num_seqs: int, num_prefixes: int) -> int:
        spec = group.spec
        if not isinstance(spec, WindowSpec):
            return spec.usual_pages(self.length) * max_num_seqs + 1
        step = -(-self.step_tokens // spec.page_size) + 1
        return spec.usual_pages(self.length) * (max_num_seqs + num_prefixes) + step + 1

    @property
    def enough(self) -> int:
        """Number of pages with which no request ever waits for pages."""
        kept = [enough for enough, keeps in zip(self._enough, self._keeps, strict=True) if keeps]
        return max(kept or self._enough, default=2)

    @property
    def least(self) -> int:
        """Number of pages with which one request of the full length fits."""
        return 1 + max((g.spec.max_pages(self.length, self.step_tokens) for g in self.groups), default=1)

    def group_pages(self, num_pages: int) -> tuple[int, ...]:
        """Pages of each group, if a group that keeps every position has `num_pages`."""
        if not any(self._keeps):
            return (num_pages,) * len(self.groups)
        return tuple(
            num_pages if keeps else min(num_pages, enough)
            for enough, keeps in zip(self._enough, self._keeps, strict=True)
        )

    def num_bytes(self, num_pages: int) -> int:
        pages = self.group_pages(num_pages)
        return sum(group.bytes_per_page * num for group, num in zip(self.groups, pages, strict=True))

    def pages_in(self, num_bytes: int) -> int:
        """The largest number of pages that fits into this memory."""
        if not self.groups:
            return 2
        fits, too_many = 0, num_bytes // min(group.bytes_per_page for group in self.groups) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.num_bytes(middle) <= num_bytes:
                fits = middle
            else:
                too_many = middle
        return fits

    def longest(self, num_pages: int) -> int:
        """Positions of the longest request that fits alone, at most `length`."""
        longest = self.length
        for group, num in zip(self.groups, self.group_pages(num_pages), strict=True):
            if group.spec.max_pages(self.length, self.step_tokens) > num - 1:
                longest = min(longest, (num - 1) * group.spec.page_size)
        return longest
