"""RowAllocator: assigns rows to running requests.

A row is free as soon as its request gives it up: steps in flight run before the plan that uses the row next, and that
plan sends the release to the device.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import prod

from slipstream.contracts.request import Request, Status

_KINDS = (slice(0, 1), slice(1, 2), slice(2, 4))  # device tables, as parts of Request.list_sizes


class RowAllocator:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.running: list[Request] = []  # by priority, then number: the last is preempted first
        self.num_with_logprobs = 0  # running requests with logprobs
        # `list_sizes` of running requests that have them, each column in ascending order
        self._list_sizes: tuple[list[int], ...] = ([], [], [], [])
        self._free = list(range(num_rows - 1, -1, -1))
        self._released: list[int] = []  # rows freed since the last plan
        self._next_admission = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, request: Request, num_cached: int) -> None:
        """Give a row to a request, `num_cached` of whose positions are in the cache."""
        request.status = Status.RUNNING
        request.row = self._free.pop()
        request.admission = self._next_admission
        request.num_known = len(request.tokens)
        request.computed = request.committed = num_cached
        self._next_admission += 1
        self.num_with_logprobs += request.num_logprobs is not None
        if request.list_sizes is not None:
            for size, others in zip(request.list_sizes, self._list_sizes, strict=True):
                if size:
                    insort(others, size)
        running = self.running
        if not running or _rank(running[-1]) < _rank(request):  # the usual case
            running.append(request)
        else:
            insort(running, request, key=_rank)

    def free(self, request: Request) -> None:
        running = self.running
        # pooled requests are freed in the order in which they were admitted: the first comes first
        del running[0 if running[0] is request else bisect_left(running, _rank(request), key=_rank)]
        self.num_with_logprobs -= request.num_logprobs is not None
        if request.list_sizes is not None:
            for size, others in zip(request.list_sizes, self._list_sizes, strict=True):
                if size:
                    del others[bisect_left(others, size)]
        self._free.append(request.row)
        self._released.append(request.row)
        request.row = request.admission = -1
        request.computed = request.committed = request.num_known = request.decode_limit = 0

    def can_share_tables(self, request: Request, max_elements: int) -> bool:
        """Whether this request can be admitted: whether each array of logprobs of a step, and each table of lists on
        the device, then has at most `max_elements` elements. All entries of a table are as long as the longest. A
        single request is always admitted."""
        if request.list_sizes is None:
            return True
        for kind in _KINDS:
            own, others = request.list_sizes[kind], self._list_sizes[kind]
            if own[0] and others[0]:
                longest = prod(max(size, sizes[-1]) for size, sizes in zip(own, others, strict=True))
                if (len(others[0]) + 1) * longest > max_elements:
                    return False
        return True

    def take_released(self) -> list[int]:
        """Rows freed since the last call."""
        released, self._released = self._released, []
        return released

    def check(self, running: Iterable[Request]) -> None:
        """Assert that exactly these requests run, each in a row of its own. For tests."""
        assert self.running == sorted(self.running, key=_rank), "running requests are out of order"
        assert set(running) == set(self.running), "running requests and their list differ"
        rows = [request.row for request in self.running]
        assert sorted(rows + self._free) == list(range(self.num_rows)), f"rows are lost: {rows}"
        assert self.num_with_logprobs == sum(request.num_logprobs is not None for request in self.running)
        for index, sizes in enumerate(self._list_sizes):
            assert sizes == sorted(size for r in self.running if r.list_sizes and (size := r.list_sizes[index]))


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.number
