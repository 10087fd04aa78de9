"""WaitingQueue: requests without a row, by priority, then by fair turns of their callers, then in the order they came.

A caller with thousands of requests does not keep another from being seated: see `turns.py`. A preempted request goes
before all that have not begun, since somebody reads its text. A request that also waits for something else (`WaitFor`)
is in the queue, but is not taken before all of that is there.
"""

from __future__ import annotations

from slipstream.errors import QueueFull
from slipstream.request import Request, WaitFor
from slipstream.scheduler.fair_queueing import FairQueue
from slipstream.scheduler.lazy_heap import LazyHeap


class WaitingQueue:
    """Every operation takes O(log n), a now and then amortised clearing of what was removed included."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._ready: dict[int, Request] = {}  # by number
        self._held: dict[int, Request] = {}  # those that wait for something else
        self._levels: dict[int, _Level] = {}  # by priority, those with a request that is ready
        self._priorities: LazyHeap[int] = LazyHeap()

    def __len__(self) -> int:
        """All that wait, for whatever."""
        return len(self._ready) + len(self._held)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._ready or request.number in self._held

    def check_room(self, count: int) -> None:
        """Refuse newcomers the queue has no room for. Preempted requests may always come back."""
        if len(self) + count > self.max_waiting:
            more = f"{count} samples do" if count > 1 else "one more does"
            raise QueueFull(
                f"{len(self)} requests are waiting and {more} not fit under the limit of {self.max_waiting}; "
                f"try again later or raise --max-waiting"
            )

    def push(self, request: Request, waits_for: WaitFor = WaitFor.NOTHING) -> None:
        assert request not in self, f"{request} waits already"
        request.waits_for = waits_for
        if waits_for:
            self._held[request.number] = request
        else:
            self._push_ready(request)

    def ready(self, request: Request, what: WaitFor) -> None:
        """The request need not wait for this any more. Nothing happens if it did not: it may be gone since."""
        if request.number in self._held:
            request.waits_for &= ~what
            if not request.waits_for:
                del self._held[request.number]
                self._push_ready(request)

    def _push_ready(self, request: Request) -> None:
        self._ready[request.number] = request
        if (level := self._levels.get(request.priority)) is None:
            level = self._levels[request.priority] = _Level()
            self._priorities.push(request.priority, self._levels.__contains__)
        level.push(request)

    def head(self) -> Request | None:
        """The next to be taken, left in its place."""
        priority = self._priorities.top(self._levels.__contains__)
        return None if priority is None else self._ready[self._levels[priority].head()]

    def remove(self, request: Request) -> None:
        """Take any request out."""
        if self._held.pop(request.number, None) is not None:
            return
        del self._ready[request.number]
        level = self._levels[request.priority]
        level.remove(request)
        if not level.num_ready:
            del self._levels[request.priority]

    def charge(self, request: Request, num_tokens: int) -> None:
        """So many tokens are computed for this request's caller; those of other priorities do not count it."""
        if (level := self._levels.get(request.priority)) is not None:
            level.turns.charge(request.caller, num_tokens)

    def check(self) -> None:
        """Assert what must always hold; for tests."""
        assert all(request.waits_for for request in self._held.values()), "a request is held for nothing"
        assert sum(level.num_ready for level in self._levels.values()) == len(self._ready), "a request is lost"
        for priority, level in self._levels.items():
            own = [request for request in self._ready.values() if request.priority == priority]
            level.check(own)


class _Level:
    """Requests of one priority that may be taken."""

    __slots__ = ("num_ready", "turns", "_returning", "_lanes")

    def __init__(self) -> None:
        self.num_ready = 0
        self.turns = FairQueue()
        self._returning = _Lane()  # preempted requests
        self._lanes: dict[str, _Lane] = {}  # the others, by caller

    def push(self, request: Request) -> None:
        self.num_ready += 1
        if request.num_preemptions:
            self._returning.push(request.number)
            return
        if (lane := self._lanes.get(request.caller)) is None:
            lane = self._lanes[request.caller] = _Lane()
            self.turns.enter(request.caller)
        lane.push(request.number)

    def head(self) -> int:
        """The number of the request to be taken next."""
        if self._returning.numbers:
            return self._returning.first()
        caller = self.turns.next()
        assert caller is not None, f"{self.num_ready} requests are ready and no caller has one"
        return self._lanes[caller].first()

    def remove(self, request: Request) -> None:
        self.num_ready -= 1
        if request.num_preemptions:
            self._returning.numbers.remove(request.number)
            return
        lane = self._lanes[request.caller]
        lane.numbers.remove(request.number)
        if not lane.numbers:
            del self._lanes[request.caller]
            self.turns.leave(request.caller)

    def check(self, requests: list[Request]) -> None:
        assert self.num_ready == len(requests) > 0, f"{self.num_ready} said to be ready, {requests}"
        lanes = [self._returning.numbers, *(lane.numbers for lane in self._lanes.values())]
        assert sorted(number for numbers in lanes for number in numbers) == sorted(r.number for r in requests)
        assert self.turns.num_waiting == len(self._lanes) and all(lane.numbers for lane in self._lanes.values())


class _Lane:
    """Numbers of requests that may be taken, the first to come first."""

    __slots__ = ("numbers", "_heap")

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._heap: LazyHeap[int] = LazyHeap()

    def push(self, number: int) -> None:
        self._heap.push(number, self.numbers.__contains__)
        self.numbers.add(number)

    def first(self) -> int:
        number = self._heap.top(self.numbers.__contains__)
        assert number is not None, f"{self.numbers} are not in the heap"
        return number
