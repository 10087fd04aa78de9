"""WaitingQueue: requests without a row, ordered by priority, then by fair queueing of callers, then by arrival.

A caller with thousands of requests does not block other callers: see `fair_queueing.py`. A preempted request goes
before all that have not started, because its caller is already reading output. A request that also waits for something
else (`WaitFor`) is in the queue, but is not returned by `first` before that has happened.
"""

from __future__ import annotations

from slipstream.base.errors import QueueFull
from slipstream.contracts.request import Request, WaitFor
from slipstream.scheduler.fair_queueing import FairQueue
from slipstream.scheduler.lazy_heap import LazyHeap


class WaitingQueue:
    """Every operation takes O(log n), amortised."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._ready: dict[int, Request] = {}  # by number
        self._held: dict[int, Request] = {}  # by number: requests that wait for something besides their turn
        self._levels: dict[int, _Level] = {}  # by priority: levels with a ready request
        self._priorities: LazyHeap[int] = LazyHeap()

    def __len__(self) -> int:
        """All waiting requests, ready or not."""
        return len(self._ready) + len(self._held)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._ready or request.number in self._held

    def check_room(self, count: int) -> None:
        """Raise QueueFull if there is no room for new requests. Preempted requests may always return."""
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
        """The request no longer waits for `what`. No effect if the request is not held: it may have ended."""
        if request.number in self._held:
            request.waits_for &= ~what
            if not request.waits_for:
                del self._held[request.number]
                self._push_ready(request)

    def hold(self, request: Request, what: WaitFor) -> None:
        """A ready request waits for `what` from now on. It keeps its turn."""
        self.remove(request)
        self.push(request, what)

    def _push_ready(self, request: Request) -> None:
        self._ready[request.number] = request
        if (level := self._levels.get(request.priority)) is None:
            level = self._levels[request.priority] = _Level()
            self._priorities.push(request.priority, self._levels.__contains__)
        level.push(request)

    def first(self) -> Request | None:
        """The next request to admit. It stays in the queue."""
        priority = self._priorities.top(self._levels.__contains__)
        return None if priority is None else self._ready[self._levels[priority].first()]

    def remove(self, request: Request) -> None:
        """Remove a request, ready or not."""
        if self._held.pop(request.number, None) is not None:
            return
        del self._ready[request.number]
        level = self._levels[request.priority]
        level.remove(request)
        if not level.num_ready:
            del self._levels[request.priority]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge computed tokens to the request's caller, within its priority."""
        if (level := self._levels.get(request.priority)) is not None:
            level.fair_queue.charge(request.caller, num_tokens)

    def check(self) -> None:
        """Assert the invariants of the queue. For tests."""
        assert all(request.waits_for for request in self._held.values()), "a held request waits for nothing"
        assert sum(level.num_ready for level in self._levels.values()) == len(self._ready), "a ready request is lost"
        for priority, level in self._levels.items():
            own = [request for request in self._ready.values() if request.priority == priority]
            level.check(own)


class _Level:
    """Ready requests of one priority."""

    __slots__ = ("num_ready", "fair_queue", "_returning", "_by_caller")

    def __init__(self) -> None:
        self.num_ready = 0
        self.fair_queue = FairQueue()
        self._returning = _CallerQueue()  # preempted requests
        self._by_caller: dict[str, _CallerQueue] = {}  # all others

    def push(self, request: Request) -> None:
        self.num_ready += 1
        if request.num_preemptions:
            self._returning.push(request.number)
            return
        if (queue := self._by_caller.get(request.caller)) is None:
            queue = self._by_caller[request.caller] = _CallerQueue()
            self.fair_queue.add(request.caller)
        queue.push(request.number)

    def first(self) -> int:
        """The number of the next request to admit."""
        if self._returning.numbers:
            return self._returning.first()
        caller = self.fair_queue.next()
        assert caller is not None, f"{self.num_ready} requests are ready and no caller has one"
        return self._by_caller[caller].first()

    def remove(self, request: Request) -> None:
        self.num_ready -= 1
        if request.num_preemptions:
            self._returning.numbers.remove(request.number)
            return
        queue = self._by_caller[request.caller]
        queue.numbers.remove(request.number)
        if not queue.numbers:
            del self._by_caller[request.caller]
            self.fair_queue.remove(request.caller)

    def check(self, requests: list[Request]) -> None:
        assert self.num_ready == len(requests) > 0, f"num_ready is {self.num_ready}, ready are {requests}"
        queues = [self._returning.numbers, *(queue.numbers for queue in self._by_caller.values())]
        assert sorted(number for numbers in queues for number in numbers) == sorted(r.number for r in requests)
        assert self.fair_queue.num_waiting == len(self._by_caller) and all(
            queue.numbers for queue in self._by_caller.values()
        )


class _CallerQueue:
    """Numbers of the ready requests of one caller, smallest first."""

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
