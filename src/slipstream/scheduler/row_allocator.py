"""Seats: who runs, and in which row.

A row is free the moment its owner leaves: whatever is in flight runs before the plan that uses it next. The device
hears of it with that plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import prod

from slipstream.request import Request, Status

_KINDS = (slice(0, 1), slice(1, 2), slice(2, 4))  # of lists, in Request.list_sizes


class RowAllocator:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.running: list[Request] = []  # by priority, then number: whoever is preempted comes last
        self.num_asking = 0  # of those, requests that want logprobs
        # of those with lists, what Request.list_sizes says, each rising
        self._list_sizes: tuple[list[int], ...] = ([], [], [], [])
        self._free = list(range(num_rows - 1, -1, -1))
        self._released: list[int] = []  # since the last plan
        self._next_admission = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, request: Request, num_cached: int) -> None:
        """A newcomer sits down, with so many of its positions computed by others."""
        request.status = Status.RUNNING
        request.row = self._free.pop()
        request.admission = self._next_admission
        request.num_known = len(request.tokens)
        request.computed = request.committed = num_cached
        self._next_admission += 1
        self.num_asking += request.num_logprobs is not None
        if request.list_sizes is not None:
            for size, others in zip(request.list_sizes, self._list_sizes, strict=True):
                if size:
                    insort(others, size)
        running = self.running
        if not running or _rank(running[-1]) < _rank(request):  # mostly
            running.append(request)
        else:
            insort(running, request, key=_rank)

    def free(self, request: Request) -> None:
        running = self.running
        # of those that are pooled the first leaves first
        del running[0 if running[0] is request else bisect_left(running, _rank(request), key=_rank)]
        self.num_asking -= request.num_logprobs is not None
        if request.list_sizes is not None:
            for size, others in zip(request.list_sizes, self._list_sizes, strict=True):
                if size:
                    del others[bisect_left(others, size)]
        self._free.append(request.row)
        self._released.append(request.row)
        request.row = request.admission = -1
        request.computed = request.committed = request.num_known = request.runway = 0

    def can_list(self, request: Request, most: int) -> bool:
        """Whether a step's reports, and each kind of list on the device, stay within `most` numbers if it sits down.
        All lines of a kind are as long as the longest. One alone always may."""
        if request.list_sizes is None:
            return True
        for kind in _KINDS:
            own, others = request.list_sizes[kind], self._list_sizes[kind]
            if own[0] and others[0]:
                longest = prod(max(size, sizes[-1]) for size, sizes in zip(own, others, strict=True))
                if (len(others[0]) + 1) * longest > most:
                    return False
        return True

    def take_released(self) -> list[int]:
        """Rows given back since this was last asked."""
        released, self._released = self._released, []
        return released

    def check(self, running: Iterable[Request]) -> None:
        """Assert that these and no others sit, each in a row of their own; for tests."""
        assert self.running == sorted(self.running, key=_rank), "running requests are out of order"
        assert set(running) == set(self.running), "running requests and their list differ"
        rows = [request.row for request in self.running]
        assert sorted(rows + self._free) == list(range(self.num_rows)), f"rows are lost: {rows}"
        assert self.num_asking == sum(request.num_logprobs is not None for request in self.running)
        for place, sizes in enumerate(self._list_sizes):
            assert sizes == sorted(size for r in self.running if r.list_sizes and (size := r.list_sizes[place]))


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.number
