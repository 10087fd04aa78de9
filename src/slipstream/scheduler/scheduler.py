"""Scheduler: what each step computes, and what becomes of its result.

There is no prefill phase and no decode phase. Each request wants `computed` to catch up with the tokens it has,
`len(tokens) + pending`; `plan` gives the steps out, running requests first, and moves `computed` on at once. A row
whose positions are then all launched samples a token, which is `pending` until `commit` learns it. So a plan never
needs the value of a token, and any number of plans may be in flight.

Two facts keep this safe. The device runs plans in order, so rows and pages may be handed on the moment they are free,
whatever is still in flight. And results are handed out by `InFlight`'s list, never by who sits in a row now.

A pooling request wants its prompt alone. It leaves its row with the plan that computes its last position, so the next
plan seats another while the result is still on its way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from slipstream.config.config import SchedulerConfig
from slipstream.errors import InvalidOption, UserError
from slipstream.messages import Output
from slipstream.request import NEVER, Request, Status
from slipstream.scheduler.budget import Budget
from slipstream.scheduler.cache.manager import CacheManager, Hit
from slipstream.scheduler.fits import check_fits
from slipstream.scheduler.in_flight import InFlight
from slipstream.scheduler.plan_builder import Chunk, DecodeArrays, PlanBuilder, Pooling
from slipstream.scheduler.queries import Queries
from slipstream.scheduler.reports import (
    draw_failure,
    logprob_reports,
    lost_query,
    pool_failure,
    pooled_report,
    prompt_reports,
)
from slipstream.scheduler.stopping import check_stop
from slipstream.scheduler.waiting import WaitingQueue
from slipstream.step import StepPlan, StepResult

_SCORED_AT_ONCE = 2**20  # prompt logprobs that one request reports in one step, where its prompt may be cut


class Scheduler:
    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        if not config.chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
            raise InvalidOption(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}, less than the model length of "
                f"{config.max_model_len}, and chunked prefill is off: the longest prompts could never be computed; "
                f"raise the first or turn chunked prefill on"
            )
        self.config = config
        self.cache = cache
        self.num_preemptions = 0
        self.most_tokens: int | None = None  # of a step in which some row decodes; None: as many as the budget has
        self._waiting = WaitingQueue(config.max_waiting)
        self._running: list[Request] = []  # by priority, then number: whoever is preempted comes last
        self._in_flight = InFlight()
        self._arrays = DecodeArrays()
        self._live: dict[str, list[Request]] = {}  # by id: samples that have not finished
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []  # rows given back since the last plan
        self._num_asking = 0  # running requests that want logprobs
        self._num_leaving = 0
        self._queries: Queries[Request] = Queries()
        self._failures: list[Output] = []
        self._next_number = 0
        self._next_admission = 0
        self._next_step = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def has_work(self) -> bool:
        """Whether there is anything to plan, to commit or to tell."""
        return bool(self._running or self._waiting or self._in_flight or self._failures)

    def serves(self, request_id: str) -> bool:
        """Whether any sample of it has not ended."""
        return request_id in self._live

    def keeps_query(self, request_id: str) -> bool:
        """Whether the device still keeps what this request, ended or not, left for documents."""
        return self._queries.is_kept(request_id)

    # Coming and going

    def submit(self, requests: Sequence[Request]) -> None:
        """The samples of one prompt, mostly just one. The first computes it, the others wait and share its pages.

        Refuses here and now what could not run however long it waited.
        """
        leader = requests[0]
        if leader.id in self._live:
            raise UserError(f"a request {leader.id!r} is being served already; give each its own id")
        check_fits(leader, self.config.max_model_len, self.cache)
        self._waiting.check_room(len(requests))
        is_ready = leader.pooling is None or self._queries.enter(leader.id, leader, leader.pooling)
        number = self._next_number
        self._next_number += len(requests)
        self._live[leader.id] = list(requests)
        for offset, request in enumerate(requests):
            request.number = number + offset
        if is_ready:
            self._waiting.push(leader)
        else:
            self._waiting.park(leader)
        leader.siblings = list(requests[1:])
        for sibling in leader.siblings:
            sibling.leader = leader
            self._waiting.park(sibling)

    def abort(self, request_id: str, sample: int | None = None) -> list[Request]:
        """Forget a request, or one sample of it, whatever it is doing. Returns those that were still alive."""
        aborted = [request for request in self._live.get(request_id, ()) if sample in (None, request.sample)]
        for request in aborted:
            self._finish(request)
        for document in self._queries.give_up(request_id):
            if document.status is not Status.FINISHED:
                self._finish(document)
                self._failures.append(lost_query(document.id))
        return aborted

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute before another result is seen."""
        builder = PlanBuilder(self._next_step, len(self.cache.groups))
        budget = Budget(self.config, len(self._free_rows))
        if self.most_tokens is not None and self.most_tokens < budget.tokens and self.config.chunked_prefill:
            num_decodes = sum(request.computed >= request.num_known for request in self._running)
            if num_decodes:
                budget.tokens = min(budget.tokens, max(self.most_tokens, num_decodes + 1))
        if self._plan_running(builder, budget):
            self._plan_waiting(builder, budget)
        if not builder:
            return None  # rows released meanwhile are told to the device with the next plan
        sampling = builder.sort()
        num_logprobs = None
        if self._num_asking:
            asked = [k for request in sampling if (k := request.params.num_logprobs) is not None]
            num_logprobs = max(asked, default=None)
        pooled = builder.pooled()
        plan = builder.build(self._released, num_logprobs, self._arrays, self._pooling(pooled))
        self._in_flight.launch(
            self._next_step,
            sampling,
            None if plan.scores is None else builder.scored(),
            builder.unsampled() if self.cache.forgets else None,
            pooled,
        )
        self._released = []
        self._next_step += 1
        for chunk in builder.chunks:
            # from the next plan on: copies of a page are made before the step's own writes
            if chunk.samples and chunk.request.siblings:
                self._let_siblings_go(chunk.request)
        for request in pooled:
            self._leave_early(request)
        return plan

    def _pooling(self, pooled: list[Request]) -> Pooling | None:
        forgotten = self._queries.take_forgotten()
        if not pooled and not forgotten:
            return None
        params = tuple([request.pooling for request in pooled if request.pooling is not None])
        queries = np.array([self._queries.number_of(own) for own in params], np.int32) if self._queries else None
        return Pooling(params, queries, forgotten)

    def _plan_running(self, builder: PlanBuilder, budget: Budget) -> bool:
        """Give running requests their tokens. False if one had to make room: then nobody should be let in."""
        running, decodes = self._running, builder.decodes
        num_preemptions = self.num_preemptions
        left = budget.tokens
        num_decodes = -1  # of all running; chunks leave them their tokens. Counted when first needed
        # Whoever lacks pages takes them from the end of this list, from requests not planned yet.
        for request in running:
            if not left:
                break
            start = request.computed
            if start >= request.runway:
                if start < request.num_known:
                    if num_decodes < 0:
                        num_decodes = sum(1 for other in running if other.computed >= other.num_known)
                    num = min(self._wanted(request, start, request.num_known), left - (num_decodes - len(decodes)))
                    if num <= 0:
                        if builder:
                            continue
                        num = 1  # the first in line always moves
                    if start + num > request.capacity and not self._make_room(request, start + num, builder):
                        return False
                    self._plan_chunk(request, num, builder)
                    left -= num
                    continue
                if start + 1 >= request.max_length:
                    continue  # its last token is on the way
                if not self._make_room(request, start + 1, builder):
                    return False
                self._set_runway(request)
            # All known tokens are launched, so exactly one is wanted: the token it drew last.
            request.computed = start + 1
            request.pending += 1
            decodes.append(request)
            left -= 1
        budget.tokens = left
        return self.num_preemptions == num_preemptions

    def _plan_waiting(self, builder: PlanBuilder, budget: Budget) -> None:
        """Let newcomers in, in their order: nobody overtakes the head because it is smaller."""
        cache = self.cache
        while budget.tokens and budget.rows:
            request = self._waiting.head()
            # every running row may ask for a page in each step that can be launched before a result is seen
            watermark = len(self._running) * (self.config.depth + 1)
            if request is None or cache.num_free <= watermark:
                return
            known = len(request.tokens)
            hit = self._hit(request)
            num = self._wanted(request, hit.length, known)
            if num > budget.tokens:
                if not self.config.chunked_prefill:
                    return
                num = budget.tokens
            length = hit.length + num
            places = cache.places_for(length)
            numbers = request.num_staged_ids + (known if request.params.needs_history else 0)
            if not budget.can_stage(places, numbers):
                return
            changed = cache.reserve(request, length, hit, keep=watermark, known=known)
            if changed is None:
                return
            budget.admit(num, places, numbers)
            self._waiting.remove(request)
            self._seat(request, hit, builder)
            builder.change_pages(request.row, changed)
            self._plan_chunk(request, num, builder)

    def _hit(self, request: Request) -> Hit:
        """What a newcomer need not compute."""
        if request.unscored != NEVER or not self._may_skip(request):
            return self.cache.nothing  # its results come from hidden states, which nobody keeps
        leader = request.leader
        if (
            leader is not None
            and leader.status is Status.RUNNING
            and leader.computed >= leader.num_known
            # launched by an earlier plan: copies are made before the step's own writes
            and leader.caught_up < self._next_step
        ):
            hit = self.cache.fork(request, leader)
            if hit is not None:
                return hit
        return self.cache.match(request)

    def _seat(self, request: Request, hit: Hit, builder: PlanBuilder) -> None:
        """A new admission, with its pages reserved."""
        for group, page in enumerate(hit.partial):
            builder.copies.append((group, page, request.pages[group][len(hit.pages[group])]))
        if not request.num_preemptions:
            request.num_cached = hit.length
        request.leader = None
        request.status = Status.RUNNING
        request.row = self._free_rows.pop()
        request.admission = self._next_admission
        request.num_known = len(request.tokens)
        request.computed = request.committed = hit.length
        self._next_admission += 1
        self._num_asking += request.params.num_logprobs is not None
        insort(self._running, request, key=_rank)
        builder.admit(request)

    def _plan_chunk(self, request: Request, num: int, builder: PlanBuilder) -> None:
        """Compute `num` known tokens. Their pages may be found at once: in a step, writes come before reads."""
        start = request.computed
        request.computed = start + num
        is_last = request.computed == request.num_known
        samples = is_last and request.pooling is None
        if samples:
            request.pending += 1
            request.caught_up = self._next_step
            self._set_runway(request)
        first, num_scored = 0, 0
        if request.unscored != NEVER:
            first = request.unscored
            num_scored = max(0, min(request.computed, request.num_prompt - 1) + 1 - first)
            request.unscored = first + num_scored if first + num_scored < request.num_prompt else NEVER
        builder.chunks.append(Chunk(request, start, num, samples, is_last and not samples, first, num_scored))
        self.cache.publish(request)

    def _wanted(self, request: Request, start: int, known: int) -> int:
        """The known tokens it has not computed; those of a long report only so many at a time."""
        num = known - start
        if request.unscored != NEVER and self.config.chunked_prefill:
            num = min(num, max(1, _SCORED_AT_ONCE // max(1, request.params.prompt_logprobs or 0)))
        return num

    def _set_runway(self, request: Request) -> None:
        request.runway = min(request.capacity, request.max_length - 1)

    def _may_skip(self, request: Request) -> bool:
        """Whether its result needs nothing of positions whose cache content exists already."""
        return request.pooling is None or request.pooling.task in self.config.cached_tasks

    def _make_room(self, request: Request, length: int, builder: PlanBuilder) -> bool:
        """Reserve pages, preempting from the end until there are enough; False if it came to the request itself.

        If it did, and steps in flight hold pages that it will give back, it keeps its row and waits for them.
        """
        while (changed := self.cache.reserve(request, length)) is None:
            victim = self._running[-1]
            if victim is request and self.cache.will_give_back(request):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        builder.change_pages(request.row, changed)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to waiting, at its old place. Tokens in flight are still its own, and it returns once they are known."""
        self._leave_row(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.status = Status.WAITING
        if request.pending:
            self._waiting.park(request)
        else:
            self._waiting.push(request)
        self._let_siblings_go(request)

    # Committing

    def commit(self, result: StepResult) -> list[Output]:
        """Learn the result of the oldest plan in flight. Costs as much as it has sampling rows, long or short."""
        launched = self._in_flight.oldest()
        for request, admission, length in launched.chunks:
            if request.admission == admission:
                request.committed = length
        drawn: list[int] = result.tokens.tolist()
        assert len(drawn) == len(launched.requests), (
            f"step {launched.step} samples {len(launched.requests)} rows, its result has {len(drawn)}"
        )
        count = len(drawn)
        failed = result.failed.tolist() if np.count_nonzero(result.failed) else repeat(False, count)
        tops = repeat(None, count) if result.logprobs is None else logprob_reports(launched.requests, result.logprobs)
        outputs = self.take_failures()
        if result.prompt_logprobs is not None:
            outputs += prompt_reports(launched.scored, result.prompt_logprobs)
        if launched.pooled:
            outputs += self._commit_pooled(launched.pooled, result)
        for request, admission, token, bad, top in zip(
            launched.requests, launched.admissions, drawn, failed, tops, strict=True
        ):
            request.pending -= 1
            if request.admission != admission and request.status is Status.FINISHED:
                continue  # launched once more before its end was known
            if bad:
                outputs.append(draw_failure(request))
                self._finish(request, spoiled=True)
                continue
            tokens = request.tokens
            tokens.append(token)
            if token in request.stop_ids or len(tokens) >= request.max_length:
                reason, stop = check_stop(request, token)
                if reason is not None:
                    outputs.append(Output(request.id, request.sample, [token], top, reason, stop, request.num_cached))
                    self._finish(request)
                    continue
            outputs.append(Output(request.id, request.sample, [token], top, None, None, request.num_cached))
            if len(tokens) > request.publish_after:
                self.cache.publish(request)
            elif request.admission != admission and not request.pending:
                self._waiting.unpark(request)  # preempted, and now all its tokens are known
        return outputs

    def _commit_pooled(self, requests: list[Request], result: StepResult) -> Iterator[Output]:
        assert len(requests) == len(result.pooled), f"{len(requests)} pool, {len(result.pooled)} results came back"
        for place, (request, pooled) in enumerate(zip(requests, result.pooled, strict=True)):
            if request.status is Status.FINISHED:
                continue  # aborted
            self._finish(request, spoiled=place in result.pool_failed)
            if place in result.pool_failed:
                yield pool_failure(request.id)
            else:
                yield pooled_report(request.id, pooled, request.num_cached)

    def take_failures(self) -> list[Output]:
        """Requests that ended without a step of their own."""
        failures, self._failures = self._failures, []
        return failures

    def _finish(self, request: Request, *, spoiled: bool = False) -> None:
        """The end, from any state. Results still in flight will be dropped."""
        if request.status is Status.RUNNING:
            self._leave_row(request, spoiled=spoiled)
        elif request.status is Status.LEAVING:
            self._num_leaving -= 1
            if spoiled:
                self.cache.forget(request)
        else:
            self._waiting.remove(request)
        request.status = Status.FINISHED
        if request.pooling is not None:
            self._queries.end(request.pooling)
        if request.leader is not None:
            if request in request.leader.siblings:
                request.leader.siblings.remove(request)
            request.leader = None
        self._let_siblings_go(request)
        samples = self._live[request.id]
        samples.remove(request)
        if not samples:
            del self._live[request.id]

    def _leave_row(self, request: Request, *, spoiled: bool = False) -> None:
        """Row and pages are free at once: whatever is in flight runs before the plan that uses them next."""
        del self._running[bisect_left(self._running, _rank(request), key=_rank)]
        self._num_asking -= request.params.num_logprobs is not None
        self._free_rows.append(request.row)
        self._released.append(request.row)
        self.cache.release(request, spoiled=spoiled)
        request.row = request.admission = -1
        request.computed = request.committed = request.num_known = request.runway = 0

    def _leave_early(self, request: Request) -> None:
        """All of a pooling request is launched: it needs its row and its pages no more."""
        self._leave_row(request)
        request.status = Status.LEAVING
        self._num_leaving += 1
        assert request.pooling is not None
        for document in self._queries.launch(request.pooling):
            self._waiting.unpark(document)

    def _let_siblings_go(self, leader: Request) -> None:
        """They need not wait for their leader any longer, for better or worse."""
        for sibling in leader.siblings:
            self._waiting.unpark(sibling)
        leader.siblings = []

    def check(self) -> None:
        """Assert every invariant of scheduler and cache; for tests."""
        self.cache.check()
        live = [request for samples in self._live.values() for request in samples]
        self._in_flight.check(live)
        assert self._running == sorted(self._running, key=_rank), "running requests are out of order"
        running = [request for request in live if request.status is Status.RUNNING]
        waiting = [request for request in live if request.status is Status.WAITING]
        assert len(running) + len(waiting) + self._num_leaving == len(live), "a finished request is still listed"
        assert set(running) == set(self._running), "running requests and their list differ"
        rows = [request.row for request in running]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), f"rows are lost: {rows}"
        assert self._num_asking == sum(request.params.num_logprobs is not None for request in running)
        assert len(self._waiting) == len(waiting), f"{len(self._waiting)} in the queue, {len(waiting)} waiting"
        for request in waiting:
            assert request in self._waiting and request.row < 0 and not request.pages, f"{request} waits badly"
        for request in running:
            target = len(request.tokens) + request.pending
            assert request.computed <= target <= request.max_length, f"{request} ran ahead"
            assert request.computed < request.num_known or request.computed + 1 == target, f"{request} lost a token"


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.number
