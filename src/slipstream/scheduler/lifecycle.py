"""RequestLifecycle: moves requests from running to waiting, draining or finished, and frees what they hold."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason, Request, Status, WaitFor
from slipstream.contracts.step import StepResult
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.images import ImageSlots
from slipstream.scheduler.outputs import Launched, check_stop, refusal
from slipstream.scheduler.query_registry import QueryRegistry
from slipstream.scheduler.waiting import WaitingQueue


class RequestLifecycle:
    """The scheduler starts requests; they leave their rows here, for whatever reason."""

    def __init__(
        self,
        cache: CacheManager,
        waiting: WaitingQueue,
        rows: RowAllocator,
        queries: QueryRegistry[Request],
        constraints: Constraints | None = None,
        adapters: Adapters[Request] | None = None,
        images: ImageSlots | None = None,
    ) -> None:
        self.live: dict[str, list[Request]] = {}  # by id: samples that have not ended
        self.num_draining = 0
        self._cache = cache
        self._waiting = waiting
        self._rows = rows
        self._queries = queries
        self._constraints = constraints
        self._adapters = adapters
        self._images = images

    def requeue(self, request: Request) -> None:
        """Move a running request back to the waiting queue. It is admitted again once its tokens in flight are
        known."""
        self._free_row(request)
        request.num_preemptions += 1
        request.status = Status.WAITING
        self._waiting.push(request, WaitFor.TOKENS if request.pending else WaitFor.NOTHING)
        self.release_siblings(request)

    def drain(self, request: Request) -> None:
        """All positions of a pooling request are launched: release its row and its pages."""
        self._free_row(request)
        request.status = Status.DRAINING
        self.num_draining += 1
        assert request.pooling is not None
        for document in self._queries.launch(request.pooling):
            self._waiting.ready(document, WaitFor.QUERY)

    def finish(self, request: Request) -> None:
        """End a request in any state. Results that are still in flight will be dropped."""
        if request.status is Status.RUNNING:
            self._free_row(request)
        elif request.status is Status.DRAINING:
            self.num_draining -= 1
        else:
            self._waiting.remove(request)
            self._cache.drop_match(request)
        request.status = Status.FINISHED
        if self._constraints is not None and request.is_constrained:
            self._constraints.leave(request)
        if self._adapters is not None:
            self._adapters.leave(request)
        if request.pooling is not None:
            self._queries.end(request.pooling)
        if request.leader is not None:
            detach_from_leader(request)
        if request.siblings:
            self.release_siblings(request)
        live = self.live[request.id]
        if len(live) == 1:
            del self.live[request.id]
        else:
            live.remove(request)

    def take_ready(self) -> Iterator[Output]:
        """Make requests ready whose pages of other engines have arrived or will not, and whose adapter is read or has
        a slot now; refuse those whose adapter cannot be read."""
        if self._cache.imports is not None:
            for request in self._cache.imports.take_done():
                self._waiting.ready(request, WaitFor.PAGES)
        if self._adapters is None:
            return
        for requests, error in self._adapters.take_read():
            for request in requests:
                if error is None:
                    self._waiting.ready(request, WaitFor.ADAPTER)
                else:
                    self.finish(request)
                    yield refusal(request.id, error, request.sample)
        for request in self._adapters.take_unparked():
            self._waiting.ready(request, WaitFor.ADAPTER)

    def release_siblings(self, leader: Request) -> None:
        """The samples that wait for this leader's prompt can be admitted."""
        for sibling in take_siblings(leader):
            self._waiting.ready(sibling, WaitFor.PROMPT)

    def _free_row(self, request: Request) -> None:
        if (num_decoded := request.computed - request.num_known) > 0:
            self._waiting.charge(request, num_decoded)
        self._cache.release(request)
        if self._adapters is not None:
            self._adapters.release(request, request.row)
        if self._images is not None:
            self._images.release(request)
        self._rows.free(request)
        request.held = False


# Samples of one prompt: the first (the leader) computes the prompt, the others wait and share its pages.


def join_samples(requests: Sequence[Request]) -> list[Request]:
    """Links the samples to the first. Returns those that wait for it."""
    leader = requests[0]
    leader.siblings = list(requests[1:])
    for sibling in leader.siblings:
        sibling.leader = leader
    return leader.siblings


def leader_to_fork(request: Request, step: int) -> Request | None:
    """The leader whose pages `step` can copy; None if there is none. Page copies run before the writes of the same
    step, so an earlier step must have launched the whole prompt. Leader and request must use the same rope factors."""
    leader = request.leader
    if (
        leader is not None
        and leader.status is Status.RUNNING
        and leader.computed >= leader.num_known
        and leader.known_launched_at < step
        and leader.long_rope == request.long_rope
    ):
        return leader
    return None


def detach_from_leader(request: Request) -> None:
    """The request no longer needs its leader."""
    leader, request.leader = request.leader, None
    if leader is not None and request in leader.siblings:
        leader.siblings.remove(request)


def take_siblings(leader: Request) -> list[Request]:
    """Unlinks and returns the samples that wait for this leader: its prompt is launched, or it ended."""
    siblings, leader.siblings = leader.siblings, []
    return siblings


# RowAllocator: assigns rows to running requests.
#
# A row is free as soon as its request gives it up: steps in flight run before the plan that uses the row next, and that
# plan sends the release to the device.

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


# GrammarAdvancer: the effects of grammars on requests: compiled or wrong ones, complete ones, forced tokens.

MIN_APPENDED = 3
"""Forced tokens that are appended at once. Appending fewer saves no step: the request sits one out."""
ROWS_PER_SAVED_STEP = 8
"""A step with a chunk takes longer for all of its rows. So for so many rows, one more of the request's steps must be
saved."""


class GrammarAdvancer:
    def __init__(self, constraints: Constraints, waiting: WaitingQueue, lifecycle: RequestLifecycle) -> None:
        self._constraints = constraints
        self._waiting = waiting
        self._lifecycle = lifecycle
        self._num_rows = 0  # that drew in the step committed last
        self._deferred: list[Request] = []  # of the step committed last: threads still advance their grammars

    def take_compiled(self) -> Iterator[Output]:
        """Make requests ready whose grammar is compiled, refuse those whose grammar is wrong, and let requests run
        whose masks are filled."""
        for requests, error in self._constraints.take_compiled():
            for request in requests:
                if error is None:
                    self._waiting.ready(request, WaitFor.GRAMMAR)
                else:
                    self._lifecycle.finish(request)
                    yield refusal(request.id, error, request.sample)
        yield from self._apply(self._constraints.settle(self._constraints.wake()))

    def begin(self, launched: Launched, result: StepResult) -> None:
        """The result is committed next: what threads can do meanwhile begins."""
        self._num_rows = len(launched.requests)
        self._constraints.begin(launched, result)

    def advance(self, requests: Sequence[Request]) -> Iterator[Output]:
        """`requests` drew tokens in the step that was just committed. Ends those whose grammar is complete, and appends
        forced tokens. While threads fill masks, this is left to `advance_deferred`."""
        self._constraints.processors.advance(requests)
        own = [each for each in requests if each.session is not None]
        if self._constraints.is_filling:
            self._deferred = own
        else:
            yield from self._advance(own)

    def advance_deferred(self, *, wait: bool) -> list[Output]:
        """The outputs of requests whose grammars threads have advanced. Without `wait`: none while the threads run."""
        if not self._deferred or not (wait or self._constraints.is_filled):
            return []
        deferred, self._deferred = self._deferred, []
        return list(self._advance(deferred))

    def _advance(self, requests: Sequence[Request]) -> Iterator[Output]:
        yield from self._apply(
            self._constraints.advance([each for each in requests if each.status is not Status.FINISHED])
        )

    def _apply(self, changed: Sequence[Request]) -> Iterator[Output]:
        """`changed`: requests whose grammar is complete or forces tokens."""
        for request in changed:
            session = request.session
            assert session is not None
            if session.is_complete:
                self._lifecycle.finish(request)
                yield Output(request.id, request.sample, [], None, FinishReason.STOP, None, request.num_cached)
            elif session.forced and _can_append(request):
                num_saved, num_wanted = len(session.forced), self._num_rows // ROWS_PER_SAVED_STEP
                if not request.pending:
                    if num_saved >= num_wanted:
                        yield self._append(request, session.forced)
                elif num_saved > max(MIN_APPENDED - 1, num_wanted + 1):
                    request.hold()  # the first of them is being drawn; the others are appended when it is committed

    def _append(self, request: Request, forced: list[int]) -> Output:
        """Append tokens that the grammar forces: they are computed as one chunk instead of one step each."""
        assert request.session is not None
        self._waiting.charge(request, request.computed - request.num_known)
        new = forced[: request.max_length - len(request.tokens)]
        request.know_more(new)
        num_kept, reason, stop = check_stop(request, len(new))
        if reason is None:
            request.session.take(new)
            reason = FinishReason.STOP if request.session.is_complete else None
        elif num_kept < len(new):
            del request.tokens[num_kept - len(new) :]
            new = new[:num_kept]
        if reason is not None:
            self._lifecycle.finish(request)
        elif len(request.tokens) > request.short_limit:
            self._lifecycle.requeue(request)
        return Output(request.id, request.sample, new, None, reason, stop, request.num_cached)


def _can_append(request: Request) -> bool:
    is_free = request.params.can_append and request.processors is None
    # a row that sat out the step of its last known token computes that one first
    return request.status is Status.RUNNING and is_free and request.computed >= request.num_known
