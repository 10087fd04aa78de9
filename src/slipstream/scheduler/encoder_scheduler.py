"""EncoderScheduler: schedules models that compute a prompt in one step, since every token attends to the whole prompt.

Such a model keeps nothing between steps: no pages, no rows that last longer than a step, no preemption. The state is a
queue and a list of steps in flight. Small models spend most of their time on the host, so this code is optimised for
host time: a request costs a few list and dict operations, a step a few numpy calls.
"""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np

from slipstream.base.errors import QueueFull, UserError
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.messages import Output
from slipstream.contracts.request import Adapter, WaitFor
from slipstream.contracts.step import NO_INTS, AdapterPlan, Bools, Ints, PoolPlan, StepPlan, StepResult
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams
from slipstream.scheduler.adapters import Adapters, check_adapter
from slipstream.scheduler.outputs import lost_query, pool_failure, pooled_output, refusal
from slipstream.scheduler.query_registry import check_length
from slipstream.scheduler.step_scheduler import StepScheduler
from slipstream.scheduler.waiting import FairQueue

MIN_HALF_TOKENS = 512
"""Tokens from which a step is about as efficient per token as a larger one."""

MAX_TAKEN = 16  # prompts of a source that are taken at once; those that do not fit wait for the next step


class EncoderScheduler(StepScheduler["EncoderRequest"]):
    def __init__(self, config: SchedulerConfig, adapters: Adapters[EncoderRequest] | None = None) -> None:
        """`adapters`: required for LoRA adapters."""
        assert config.max_num_batched_tokens >= config.max_model_len, "the longest prompt must fit one step"
        self._live: dict[str, EncoderRequest] = {}  # by id: requests that have not ended
        super().__init__(config, adapters, self._live)
        self._levels: dict[int, _Level] = {}  # by priority; aborted requests stay until they are reached
        self._num_waiting = 0  # requests that are not done
        self._tokens_waiting = 0  # tokens of these requests
        self._in_flight: deque[list[EncoderRequest]] = deque()

    @property
    def num_running(self) -> int:
        return len(self._live) - self._num_waiting

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def may_wait_for_prompts(self) -> bool:
        return True

    def has_requests(self) -> bool:
        return bool(self._num_waiting or self._in_flight or self._failures)

    def serves(self, request_id: str) -> bool:
        return request_id in self._live

    def submit(self, request: EncoderRequest) -> None:
        if not 0 < request.num_tokens <= self.config.max_model_len:
            check_length(request.num_tokens, self.config.max_model_len, wants_output=False)
        if request.id in self._live:
            raise UserError(f"a request {request.id!r} is being served already; give each its own id")
        if self._num_waiting >= self.config.max_waiting:
            raise QueueFull(
                f"{self._num_waiting} requests are waiting, the limit is {self.config.max_waiting}; try again later or "
                "raise --max-waiting"
            )
        check_adapter(request.lora, self.adapters)
        params = request.params
        if params.query_key and not self._queries.enter(request.id, request, params, request.num_tokens):
            request.waits_for = WaitFor.QUERY
        if self.adapters is not None:
            request.waits_for |= self.adapters.enter([request])
        if not request.waits_for:
            self._push(request)
        self._live[request.id] = request
        self._num_waiting += 1
        self._tokens_waiting += request.num_tokens

    def _ready(self, request: EncoderRequest, what: WaitFor) -> None:
        """The request no longer waits for `what`."""
        request.waits_for &= ~what
        if not request.waits_for and not request.is_done:
            self._push(request)

    def _push(self, request: EncoderRequest) -> None:
        level = self._levels.get(request.params.priority)
        if level is None:
            level = self._levels[request.params.priority] = _Level()
            self._levels = dict(sorted(self._levels.items()))
        level.push(request)

    def abort(self, request_id: str, sample: int | None = None) -> list[EncoderRequest]:
        request = self._live.get(request_id) if sample in (None, 0) else None
        if request is not None:
            if not request.is_launched:
                self._dequeue(request)
            self._end(request)
        for document in self._queries.abandon(request_id):
            if not document.is_done:
                self._dequeue(document)
                self._end(document)
                self._failures.append(lost_query(document.id))
        return [] if request is None else [request]

    def _dequeue(self, request: EncoderRequest) -> None:
        self._num_waiting -= 1
        self._tokens_waiting -= request.num_tokens
        if not self._num_waiting:
            self._levels.clear()  # only requests that are done are left there

    def limit_tokens(self, limit: int | None, *, readers_wait: bool) -> None:
        self.max_num_tokens = limit if readers_wait else None

    def plan(self) -> StepPlan | None:
        """A step of as many waiting requests as fit, in the queue's order. A smaller request does not overtake."""
        if self.adapters is not None:
            self._take_adapted(self.adapters)
        taken = self._take()
        if not taken:
            return None
        count = len(taken)
        lengths = np.fromiter([request.num_tokens for request in taken], np.int32, count)
        tokens = b"".join([request.tokens for request in taken])
        rows, none, every = _all_pooled(count)
        params = tuple([request.params for request in taken])
        type_starts = _or_length([request.type_start for request in taken], lengths)
        num_seen = _or_length([request.num_seen for request in taken], lengths)
        queries = None
        if self._queries:
            queries = np.array([self._queries.number_of(own) for own in params], np.int32)
            for own in params:
                for document in self._queries.launch(own):
                    self._ready(document, WaitFor.QUERY)
        plan = StepPlan(
            step=self._next_step,
            released=NO_INTS,
            admitted=(),
            rows=rows,
            num_tokens=lengths,
            lengths=lengths,
            num_drawn=none,
            num_host_tokens=lengths,
            tokens=np.frombuffer(tokens, np.int32),
            new_pages=(),
            adapters=None if self.adapters is None else self._adapter_plan(taken, self.adapters),
            pooling=PoolPlan((), every, params, queries, self.take_freed_queries(), type_starts, num_seen),
        )
        self._next_step += 1
        self._num_waiting -= count
        self._tokens_waiting -= len(plan.tokens)
        self._in_flight.append(taken)
        return plan

    def _take(self) -> list[EncoderRequest]:
        left, rows = self.config.max_num_batched_tokens, self.config.max_num_seqs
        if self.max_num_tokens is not None:
            left = min(left, self.max_num_tokens)
        parts = self.config.depth and not self._in_flight and not self.sources
        if parts and self._tokens_waiting >= 2 * MIN_HALF_TOKENS:
            # Plan about half of the waiting tokens: the host prepares the other half while the device computes. With
            # everything in one step, callers that ask again when they are answered would stay in lockstep, and host and
            # device would take turns.
            left = min(left, -(-self._tokens_waiting // 2))
        taken: list[EncoderRequest] = []
        while True:
            for priority, level in list(self._levels.items()):
                while (caller := level.fair_queue.next()) is not None:
                    queue, used = level.queues[caller], 0
                    is_alone = level.fair_queue.num_waiting == 1
                    while queue and (is_alone or not used):
                        request = queue[0]
                        if request.is_done:
                            queue.popleft()
                            continue
                        if self.adapters is not None and not self.adapters.admit(request):
                            # the adapters of this step take all slots: the request is in the next step
                            level.fair_queue.charge(caller, used)
                            return taken
                        left -= request.num_tokens
                        rows -= 1
                        if taken and (left < 0 or rows < 0):  # the first request always fits
                            level.fair_queue.charge(caller, used)
                            if self.adapters is not None:
                                self.adapters.release(request)
                            return taken
                        request.is_launched = True
                        used += request.num_tokens
                        taken.append(queue.popleft())
                    level.fair_queue.charge(caller, used)
                    if not queue:
                        level.remove(caller)
                if priority:
                    del self._levels[priority]  # users choose priorities: keep no queue for each one ever used
            if left <= 0 or rows <= 0 or not self._take_prompts(min(rows, MAX_TAKEN)):
                return taken

    def _adapter_plan(self, taken: list[EncoderRequest], adapters: Adapters[EncoderRequest]) -> AdapterPlan | None:
        """Adapters keep their slots for one step: the device runs steps in order."""
        slots = np.array([-1 if request.adapter is None else request.adapter.slot for request in taken], np.int32)
        for request in taken:
            adapters.release(request)
        return adapters.plan_slots(slots)

    def _take_adapted(self, adapters: Adapters[EncoderRequest]) -> None:
        """Queue requests whose adapter is read; refuse those whose adapter cannot be read."""
        for requests, error in adapters.take_read():
            for request in requests:
                if error is None:
                    self._ready(request, WaitFor.ADAPTER)
                else:
                    self._dequeue(request)
                    self._end(request)
                    self._failures.append(refusal(request.id, error))

    def _take_prompts(self, limit: int) -> bool:
        """Whether `sources` had more prompts that can be planned now. Documents may have to wait."""
        if not self.sources or not self.sources.take(limit):
            return False
        return any(level.queues for level in self._levels.values())

    def commit(self, result: StepResult) -> list[Output]:
        assert self._in_flight, "a result came back while no plan is in flight"
        launched = self._in_flight.popleft()
        assert len(launched) == len(result.pooled), f"{len(launched)} requests launched, {len(result.pooled)} results"
        outputs = self.take_failures()
        for index, (request, pooled) in enumerate(zip(launched, result.pooled, strict=True)):
            if request.is_done:
                continue
            self._end(request)
            outputs.append(
                pool_failure(request.id) if index in result.pool_failed else pooled_output(request.id, pooled)
            )
        return outputs

    def _end(self, request: EncoderRequest) -> None:
        request.is_done = True
        if self.adapters is not None:
            self.adapters.leave(request)
        del self._live[request.id]
        if request.params.query_key:
            self._queries.end(request.params)

    def check(self) -> None:
        queues = [queue for level in self._levels.values() for queue in level.queues.values()]
        waiting = [request for queue in queues for request in queue if not request.is_done]
        blocked = [request for request in self._live.values() if request.waits_for]
        launched = [request for step in self._in_flight for request in step if not request.is_done]
        assert len(waiting) + len(blocked) == self._num_waiting, f"{self._num_waiting} counted, {waiting}, {blocked}"
        assert sum(request.num_tokens for request in waiting + blocked) == self._tokens_waiting, "tokens are lost"
        live = waiting + blocked + launched
        assert len({request.id for request in live}) == len(live) == len(self._live), "a request is lost"
        assert all(self._live[request.id] is request for request in live)
        if self.adapters is not None:
            self.adapters.check(live)
        assert list(self._levels) == sorted(self._levels), "priorities are out of order"
        assert all(level.fair_queue.num_waiting == len(level.queues) for level in self._levels.values())


class _Level:
    """Requests of one priority, by caller."""

    __slots__ = ("fair_queue", "queues")

    def __init__(self) -> None:
        self.fair_queue = FairQueue()
        self.queues: dict[str, deque[EncoderRequest]] = {}  # no queue is empty

    def push(self, request: EncoderRequest) -> None:
        queue = self.queues.get(request.caller)
        if queue is None:
            queue = self.queues[request.caller] = deque()
            self.fair_queue.add(request.caller)
        queue.append(request)

    def remove(self, caller: str) -> None:
        del self.queues[caller]
        self.fair_queue.remove(caller)


def _or_length(limits: list[int | None], lengths: Ints) -> Ints | None:
    """A number per request, its length where it has none; None if no request has one."""
    if limits.count(None) == len(limits):
        return None
    pairs = zip(limits, lengths.tolist(), strict=True)
    return np.array([length if own is None else own for own, length in pairs], np.int32)


@functools.lru_cache(4096)
def _all_pooled(count: int) -> tuple[Ints, Ints, Bools]:
    """Rows of a step in which every row is pooled and none draws a token. Shared, so never written."""
    return np.arange(count, dtype=np.int32), np.zeros(count, np.int32), np.ones(count, np.bool_)


# EncoderRequest: a prompt that a model computes in one step.


class EncoderRequest:
    __slots__ = (
        "id", "tokens", "num_tokens", "params", "type_start", "num_seen", "caller", "is_launched", "is_done", "lora",
        "adapter", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        tokens: Sequence[int],
        params: PoolingParams,
        type_start: int | None = None,
        num_seen: int | None = None,
        caller: str = "",
        lora: LoRARequest | None = None,
    ) -> None:
        self.id = id
        self.tokens = tokens if type(tokens) is array else array("i", tokens)
        self.num_tokens = len(tokens)
        self.params = params
        self.type_start = type_start  # first position of token type 1; None: all types are 0
        self.num_seen = num_seen  # leading tokens that all tokens attend to; None: all
        self.caller = caller  # callers of one priority are served by fair queueing
        self.lora = lora  # the adapter of the request
        self.adapter: Adapter | None = None  # set by `Adapters`
        self.waits_for = WaitFor.NOTHING
        self.is_launched = False
        self.is_done = False  # ended or aborted: skipped in queues and in results

    def __repr__(self) -> str:
        return f"EncoderRequest({self.id} of {self.num_tokens} tokens{', done' if self.is_done else ''})"
