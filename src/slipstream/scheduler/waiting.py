"""WaitingQueue: requests without a row, ordered by priority, then by fair queueing of callers, then by arrival.

`PromptSources`: prompts that a queue takes from their callers when the steps have room for them.

A caller with thousands of requests does not block other callers: see FairQueue. A preempted request goes
before all that have not started, because its caller is already reading output. A request that also waits for something
else (`WaitFor`) is in the queue, but is not returned by `first` before that has happened.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from slipstream.base.errors import QueueFull, UserError
from slipstream.contracts.request import Request, WaitFor


class WaitingQueue:
    """Every operation takes O(log n), amortised."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._ready: dict[int, Request] = {}  # by number
        self._blocked: dict[int, Request] = {}  # by number: requests that wait for something besides their turn
        self._levels: dict[int, _Level] = {}  # by priority: levels with a ready request
        self._priorities: LazyHeap[int] = LazyHeap()

    def __len__(self) -> int:
        """All waiting requests, ready or not."""
        return len(self._ready) + len(self._blocked)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._ready or request.number in self._blocked

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
            self._blocked[request.number] = request
        else:
            self._push_ready(request)

    def ready(self, request: Request, what: WaitFor) -> None:
        """The request no longer waits for `what`. No effect if the request is not blocked: it may have ended."""
        if request.number in self._blocked:
            request.waits_for &= ~what
            if not request.waits_for:
                del self._blocked[request.number]
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
        if self._blocked.pop(request.number, None) is not None:
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
        assert all(request.waits_for for request in self._blocked.values()), "a blocked request waits for nothing"
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


# FairQueue: decides which caller is served next, by fair queueing with virtual time.
#
# Each caller is charged the tokens that its requests compute; the waiting caller with the smallest charge is next. The
# virtual clock is the charge that each waiting caller would have if the service had been shared equally. A caller that
# starts to wait is set to the clock at least, so idle callers earn no credit. Callers that keep waiting get equal
# numbers of tokens, up to the size of one request. The clock overtakes every waiting caller, however many new callers
# arrive, so each caller is served eventually.


class _Account:
    __slots__ = ("used", "turn", "waits")

    def __init__(self, used: float) -> None:
        self.used = used  # charged tokens, in virtual time
        self.turn = 0  # order among callers with equal charges: first to wait, first served
        self.waits = False


class FairQueue:
    """The state is cleared whenever no caller waits."""

    __slots__ = ("num_waiting", "_accounts", "_order", "_clock", "_next_turn", "_limit")

    def __init__(self) -> None:
        self.num_waiting = 0  # callers
        # accounts of waiting callers, and of callers charged beyond the clock
        self._accounts: dict[str, _Account] = {}
        self._order: LazyHeap[tuple[float, int, str]] = LazyHeap()
        self._clock = 0.0
        self._next_turn = 0
        self._limit = 64

    def add(self, caller: str) -> None:
        """The caller has a waiting request; it had none before."""
        account = self._account(caller)
        assert not account.waits, f"{caller!r} waits already"
        account.used = max(account.used, self._clock)
        account.waits = True
        account.turn, self._next_turn = self._next_turn, self._next_turn + 1
        self.num_waiting += 1
        self._order.push((account.used, account.turn, caller), self._is_live)

    def remove(self, caller: str) -> None:
        """The caller has no waiting request any more."""
        account = self._accounts[caller]
        assert account.waits, f"{caller!r} does not wait"
        account.waits = False
        self.num_waiting -= 1
        if not self.num_waiting:
            self._accounts.clear()
            self._clock = 0.0
        elif account.used <= self._clock:
            del self._accounts[caller]

    def next(self) -> str | None:
        """The caller to serve next; None if none waits."""
        first = self._order.top(self._is_live)
        return None if first is None else first[2]

    def charge(self, caller: str, num_tokens: int) -> None:
        if not self.num_waiting or not num_tokens:
            return
        account = self._account(caller)
        if account.waits:
            self._clock += num_tokens / self.num_waiting
            account.used += num_tokens
            self._order.push((account.used, account.turn, caller), self._is_live)
        else:
            account.used = max(account.used, self._clock) + num_tokens
            self._clock += num_tokens / (self.num_waiting + 1)

    def _account(self, caller: str) -> _Account:
        if (account := self._accounts.get(caller)) is None:
            if len(self._accounts) >= self._limit:
                self._accounts = {
                    name: old for name, old in self._accounts.items() if old.waits or old.used > self._clock
                }
                self._limit = 2 * len(self._accounts) + 64
            account = self._accounts[caller] = _Account(self._clock)
        return account

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        used, turn, caller = entry
        account = self._accounts.get(caller)
        return account is not None and account.waits and (account.used, account.turn) == (used, turn)


# PromptSources: prompts of calls that are submitted as the steps have room for them.

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RequestSource(Protocol[R_co]):
    """A `PromptSource` whose prompts are requests of a scheduler."""

    def is_ready(self) -> bool: ...
    def take(self, limit: int) -> Sequence[R_co]: ...
    def fail(self, error: BaseException) -> None: ...


class _Open(Generic[R]):
    __slots__ = ("source", "is_lazy", "unsubmitted")

    def __init__(self, source: RequestSource[R], is_lazy: bool) -> None:
        self.source = source
        self.is_lazy = is_lazy
        self.unsubmitted: Sequence[R] = ()  # requests that the full queue refused


class PromptSources(Generic[R]):
    """The sources of the calls that have more prompts. The newest comes first: a call that the callback of another call
    makes ends before that one goes on."""

    def __init__(self, submit: Callable[[R], None], queue: Sized) -> None:
        """`submit` raises if the request is refused. `queue`: the requests that wait."""
        self._submit = submit
        self._queue = queue
        self._open: list[_Open[R]] = []
        self.num_refused = 0  # prompts, of which each has ended its source

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def is_lazy(self) -> bool:
        """Whether prompts are taken as late as the steps allow; else as early as the queue allows."""
        return self._open[-1].is_lazy

    def is_ready(self) -> bool:
        """Whether `take` does not wait."""
        return bool(self._open[-1].unsubmitted) or self._open[-1].source.is_ready()

    def add(self, source: RequestSource[R], *, is_lazy: bool) -> Callable[[], None]:
        """Takes prompts of the source until they have ended, or until the function that is returned is called."""
        opened = _Open(source, is_lazy)
        self._open.append(opened)
        return partial(self._close, opened)

    def _close(self, opened: _Open[R]) -> None:
        self._open = [each for each in self._open if each is not opened]

    def take(self, limit: int) -> int:
        """Submits up to `limit` prompts and returns how many it took: one, which may be waited for, and more if they
        are ready. Fewer if the queue is full or the prompts have ended."""
        num = 0
        while self._open and num < limit and (not num or self.is_ready()):
            newest = self._open[-1]
            requests = newest.unsubmitted or newest.source.take(limit - num)
            count = self._submit_all(newest.source, requests[: limit - num])
            num += count
            newest.unsubmitted = requests[count:]
            if newest.unsubmitted:
                break
            if not requests:
                self._close(newest)
        return num

    def _submit_all(self, source: RequestSource[R], requests: Sequence[R]) -> int:
        """Returns how many were submitted before the queue was full; all of them if one was refused."""
        for num, request in enumerate(requests):
            try:
                self._submit(request)
            except (UserError, QueueFull) as error:
                if isinstance(error, QueueFull) and self._queue:
                    return num
                self.num_refused += 1
                source.fail(error)
                break
        return len(requests)


# LazyHeap: a heap whose entries may become stale.

T = TypeVar("T", bound=Any)  # comparable and hashable


class LazyHeap(Generic[T]):
    """Finds the smallest live entry. The owner decides which entries are live, by the same rule in every call.

    A stale entry is removed when it reaches the top, or when the heap has doubled since its last clean-up. So each
    operation takes O(log n), amortised, and the heap keeps at most about twice as many entries as were live at the same
    time. Equal entries count as one.
    """

    __slots__ = ("_heap", "_limit")

    def __init__(self) -> None:
        self._heap: list[T] = []
        self._limit = 64

    def __len__(self) -> int:
        """Number of entries, live or stale."""
        return len(self._heap)

    def push(self, entry: T, is_live: Callable[[T], bool]) -> None:
        if len(self._heap) >= self._limit:
            self._heap = list({old for old in self._heap if is_live(old)})
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, entry)

    def top(self, is_live: Callable[[T], bool]) -> T | None:
        """The smallest live entry, which stays in the heap."""
        heap = self._heap
        while heap:
            if is_live(heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None
