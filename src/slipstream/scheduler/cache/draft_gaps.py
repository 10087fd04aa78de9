"""DraftGaps: shared pages in which entries of a draft model are missing.

A draft model may fall behind the target (`scheduler/draft_lag.py`): a request has `drafted` leading positions with
entries of the draft model, NEVER if none is missing. Requests share pages, so a page with missing entries is noted when
it is published or forked; a request that gets such a page has entries up to that page only.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.contracts.request import Request


class DraftGaps:
    def __init__(self, num_groups: int, page_size: int) -> None:
        self._page_size = page_size
        self._incomplete: list[set[int]] = [set() for _ in range(num_groups)]  # per group: pages

    def admit(self, request: Request, length: int, pages: Sequence[list[int]], partial: Sequence[int]) -> None:
        """A request begins with `length` cached positions: in shared pages, and if there are any, in copies of the
        pages `partial`."""
        num_whole = min(map(len, pages), default=0)
        request.drafted = length
        for entry in range(num_whole):
            if any(own[entry] in incomplete for own, incomplete in zip(pages, self._incomplete, strict=True)):
                request.drafted = entry * self._page_size
                return
        if any(page in incomplete for page, incomplete in zip(partial, self._incomplete, strict=False)):
            request.drafted = num_whole * self._page_size

    def share(self, request: Request, first: int, last: int) -> None:
        """From now on other requests may use the pages `first` to `last` - 1 of a request."""
        border = request.drafted // self._page_size
        for pages, incomplete in zip(request.pages, self._incomplete, strict=True):
            incomplete.difference_update(pages[first : min(border, last)])
            incomplete.update(pages[max(border, first) : last])

    def open(self, request: Request, length: int) -> None:
        """The plan under construction computes positions of a request from `length` on without the draft model. Their
        pages may be shared already."""
        if length < request.drafted:
            request.drafted = length
            self.share(request, length // self._page_size, request.num_published)

    def fill(self, request: Request, length: int) -> None:
        """A request gets the missing entries up to `length`; its pages may be shared already."""
        before, request.drafted = request.drafted, length
        for pages, incomplete in zip(request.pages, self._incomplete, strict=True):
            incomplete.difference_update(pages[before // self._page_size : length // self._page_size])
