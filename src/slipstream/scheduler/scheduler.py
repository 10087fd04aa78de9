"""Scheduler: decides what each step computes, and turns step results into outputs.

There is no prefill phase and no decode phase. Each request has `computed` positions and `len(tokens) + pending` tokens;
`plan` distributes the token budget, running requests first, and advances `computed` at once. A row whose positions are
then all launched draws a token, which is `pending` until `commit` learns it. So a plan never needs the value of a
token, and any number of plans may be in flight.

Two facts make this safe. The device runs plans in order, so rows and pages can be reused as soon as they are free on
the host, while steps that use them are still in flight. And results are assigned by the list in `InFlight`, never by
the present owner of a row.

A pooling request only needs its prompt computed. It gives up its row with the plan that computes its last position, so
the next plan can reuse the row while the result is still in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import numpy as np

from slipstream.base.errors import UserError
from slipstream.config.config import ImageConfig, SchedulerConfig
from slipstream.contracts.messages import Output
from slipstream.contracts.request import NEVER, Request, Status, WaitFor
from slipstream.contracts.step import PoolPlan, StepPlan, StepResult
from slipstream.params.sampling import MAX_PACKED_LOGPROBS
from slipstream.scheduler.adapters import Adapters, check_adapter
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.drafting import DraftCounts, DraftPlanner
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.images import ImageSlots, check_images
from slipstream.scheduler.lifecycle import GrammarAdvancer, RequestLifecycle, RowAllocator, join_samples
from slipstream.scheduler.outputs import (
    InFlight,
    Launched,
    accepted_tokens,
    check_stop,
    draw_failure,
    logprob_bytes,
    lost_query,
    packed_logprobs,
    pool_failure,
    pooled_output,
    prompt_outputs,
)
from slipstream.scheduler.plan_builder import DecodeArrays, PlanBuilder
from slipstream.scheduler.planners import Admitter, Budget, RunningPlanner
from slipstream.scheduler.query_registry import admits_any_request, check_admissible
from slipstream.scheduler.step_scheduler import StepScheduler
from slipstream.scheduler.waiting import WaitingQueue


class Scheduler(StepScheduler[Sequence[Request]]):
    cache: CacheManager
    drafts: DraftPlanner

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        constraints: Constraints | None = None,
        adapters: Adapters[Request] | None = None,
        image_config: ImageConfig | None = None,
    ) -> None:
        """`constraints`: required for structured output and logits processors; `adapters`: for LoRA adapters;
        `image_config`: for images."""
        assert config.chunked_prefill or config.max_num_batched_tokens >= config.max_model_len, (
            "the longest prompt must fit one step"
        )
        self._waiting = WaitingQueue(config.max_waiting)
        super().__init__(config, adapters, self._waiting)
        self.cache = cache
        self.constraints = constraints
        self.images = images = None if image_config is None else ImageSlots(image_config)
        self.drafts = DraftPlanner(config, cache)
        self._row_allocator = RowAllocator(config.max_num_seqs)
        self._in_flight = InFlight()
        self._arrays = DecodeArrays()
        self._lifecycle = RequestLifecycle(
            cache, self._waiting, self._row_allocator, self._queries, constraints, adapters, images
        )
        self._admitter = Admitter(
            config,
            cache,
            self._waiting,
            self._row_allocator,
            adapters,
            images,
            sends_history=self.drafts.sends_history,
        )
        self._committer = Committer(cache, self._waiting, self._lifecycle, self._arrays, self.drafts.counts)
        self._advancer = None if constraints is None else GrammarAdvancer(constraints, self._waiting, self._lifecycle)
        self._running = RunningPlanner(config, cache, self._row_allocator, self._lifecycle, self.drafts, images)
        self._next_number = 0

    @property
    def num_running(self) -> int:
        return len(self._row_allocator.running)

    @property
    def num_preemptions(self) -> int:
        return self._running.num_preemptions

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        return len(self._lifecycle.live)

    @property
    def may_wait_for_prompts(self) -> bool:
        """True if no other request would go before them, and none of them can be refused."""
        return not self._lifecycle.live and admits_any_request(self.config, self.cache)

    def has_requests(self) -> bool:
        return bool(self._row_allocator.running or self._waiting or self._in_flight or self._failures)

    def serves(self, request_id: str) -> bool:
        return request_id in self._lifecycle.live

    # Submitting and aborting

    def submit(self, requests: Sequence[Request]) -> None:
        """The samples of one prompt, usually one. The first computes the prompt, the others share its pages."""
        leader = requests[0]
        if leader.id in self._lifecycle.live:
            raise UserError(f"a request {leader.id!r} is being served already; give each its own id")
        check_admissible(leader, self.config, self.cache)
        check_adapter(leader.lora, self.adapters)
        check_images(leader, self.images)
        self._waiting.check_room(len(requests))
        pooling = leader.pooling
        is_ready = pooling is None or self._queries.enter(leader.id, leader, pooling, leader.num_prompt)
        waits_for = WaitFor.NOTHING if is_ready else WaitFor.QUERY
        if pooling is None:
            waits_for |= self._constrain(requests)
        if self.adapters is not None:
            waits_for |= self.adapters.enter(requests)
        number = self._next_number
        self._next_number += len(requests)
        self._lifecycle.live[leader.id] = list(requests)
        for offset, request in enumerate(requests):
            request.number = number + offset
        self._waiting.push(leader, waits_for | self.cache.import_pages(leader))
        for sibling in join_samples(requests):
            self._waiting.push(sibling, waits_for | WaitFor.PROMPT)

    def _constrain(self, requests: Sequence[Request]) -> WaitFor:
        """Prepare the grammar and the logits processors of a request. Returns what it must wait for."""
        if self.constraints is not None:
            return self.constraints.enter(requests)
        if requests[0].params.structured_outputs is not None or requests[0].params.logits_processors:
            raise UserError("this engine has no structured output and no logits processors; remove them")
        return WaitFor.NOTHING

    def abort(self, request_id: str, sample: int | None = None) -> list[Request]:
        aborted = [request for request in self._lifecycle.live.get(request_id, ()) if sample in (None, request.sample)]
        for request in aborted:
            self._lifecycle.finish(request)
        for document in self._queries.abandon(request_id):
            if document.status is not Status.FINISHED:
                self._lifecycle.finish(document)
                self._failures.append(lost_query(document.id))
        return aborted

    # Planning

    def plan(self) -> StepPlan | None:
        self._admitter.begun.clear()
        constraints = self.constraints
        if constraints is not None and self._advancer is not None and constraints.is_waiting:
            self._failures += self._advancer.take_compiled()
        self._failures += self._lifecycle.take_ready()
        builder = PlanBuilder(self._next_step, len(self.cache.groups), self.drafts.sends_history)
        budget = Budget(self.config, self._row_allocator.num_free)
        self._running.limit_prefill(budget, self.max_num_tokens)
        if self.images is not None:
            self.images.limit_step(self.max_num_tokens if self._row_allocator.running else None)
            for request in self._admitter.take_put_off():
                self._waiting.ready(request, WaitFor.IMAGE)
        if self._running.plan(builder, budget):
            self._admitter.admit_waiting(builder, budget, self.sources)
        if not builder:
            return None  # rows released meanwhile are part of the next plan
        return self._finish_plan(builder)

    def _finish_plan(self, builder: PlanBuilder) -> StepPlan:
        """Make the plan of the chosen rows, and record what is in flight with it."""
        self.drafts.end_plan(builder)
        sampling = builder.sort()
        drawn = builder.drawn()
        constraints = self.constraints
        if constraints is not None and constraints.num_live:
            constraints.plan(sampling, drawn, self.drafts.num_proposed)
            builder.returns_drafts |= bool(constraints.drawing)
        pooled = builder.pooled()
        pooling = self._pool_plan(builder, pooled)
        released = self._row_allocator.take_released()
        plan = builder.build(
            released,
            self._num_logprobs(sampling),
            self._arrays,
            self.cache,
            pooling,
            self.drafts.num_proposed,
            self.adapters,
            None if self.images is None else self.images.plan(builder.chunks, len(builder.decodes)),
        )
        self._in_flight.launch(
            self._next_step,
            sampling,
            drawn,
            None if plan.scores is None else builder.scored(),
            None if self.cache.keeps_all else builder.unsampled(),
            pooled,
        )
        self._next_step += 1
        for chunk in builder.chunks:
            # from the next plan on: page copies run before the writes of the same step
            if chunk.num_drawn and chunk.request.siblings:
                self._lifecycle.release_siblings(chunk.request)
        for request in pooled:
            self._lifecycle.drain(request)
        return plan

    def _num_logprobs(self, sampling: list[Request]) -> int | None:
        """`StepPlan.num_logprobs` of a plan in which these requests draw."""
        if not self._row_allocator.num_with_logprobs:
            return None
        asked = [request.num_logprobs for request in sampling if request.num_logprobs is not None]
        return max((0 if k > MAX_PACKED_LOGPROBS else k for k in asked), default=None)

    def _pool_plan(self, builder: PlanBuilder, pooled: list[Request]) -> PoolPlan | None:
        """The pooling part of the plan. `pooled`: requests whose prompt ends with it."""
        params = [request.pooling for request in pooled if request.pooling is not None]
        queries = np.array([self._queries.number_of(own) for own in params], np.int32) if self._queries else None
        return builder.pool_plan(params, queries, self.take_freed_queries())

    def preempt_all(self) -> None:
        for request in reversed(list(self._row_allocator.running)):
            self._running.preempt(request)

    # Committing

    def commit(self, result: StepResult) -> list[Output]:
        outputs = self.take_failures() + self.advance_grammars(wait=True)
        launched = self._in_flight.oldest()
        advancer = self._advancer if self.constraints is not None and self.constraints.num_live else None
        if advancer is not None:
            advancer.begin(launched, result)
        outputs += self._committer.commit(launched, result)
        if advancer is not None:
            outputs += advancer.advance(launched.requests)
        return outputs

    def advance_grammars(self, *, wait: bool) -> list[Output]:
        return [] if self._advancer is None else self._advancer.advance_deferred(wait=wait)

    def sit_out(self, step: int, requests: Sequence[Request]) -> None:
        self._in_flight.sit_out(step, requests)

    def take_begun(self) -> list[str]:
        begun, self._admitter.begun = self._admitter.begun, []
        return begun

    def check(self) -> None:
        self.cache.check()
        live = [request for samples in self._lifecycle.live.values() for request in samples]
        self._in_flight.check(live)
        if self.adapters is not None:
            self.adapters.check(live)
        running = [request for request in live if request.status is Status.RUNNING]
        waiting = [request for request in live if request.status is Status.WAITING]
        assert len(running) + len(waiting) + self._lifecycle.num_draining == len(live), (
            "a finished request is still live"
        )
        self._row_allocator.check(running)
        if self.images is not None:
            self.images.check(running)
        self._waiting.check()
        assert len(self._waiting) == len(waiting), f"{len(self._waiting)} in the queue, {len(waiting)} waiting"
        for request in waiting:
            assert request in self._waiting and request.row < 0 and not request.pages, f"{request} holds a row or pages"
            assert request.computed == 0 and request.publish_after == NEVER, f"{request} computes without a row"
        for request in running:
            target = len(request.tokens) + request.pending
            assert request.computed <= target <= request.max_length, f"{request} computed more than its tokens"
            assert request.computed < request.num_known or request.computed + 1 == target, f"{request} lost a token"


# Committer: turns the result of a step into outputs. Tokens become known, and requests end.


class Committer:
    def __init__(
        self,
        cache: CacheManager,
        waiting: WaitingQueue,
        lifecycle: RequestLifecycle,
        arrays: DecodeArrays,
        drafts: DraftCounts,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._lifecycle = lifecycle
        self._arrays = arrays
        self._drafts = drafts

    def commit(self, launched: Launched, result: StepResult) -> list[Output]:
        """Process the result of a plan. Costs O(sampling rows), whatever their lengths."""
        for request, admission, length in launched.chunks:
            if request.admission == admission:
                request.committed = length
        requests = launched.requests
        count = len(requests)
        num_drawn, result = launched.without_sitting(result)
        drawn = num_drawn or repeat(1, count)
        accepted = accepted_tokens(result, num_drawn, count)
        if num_drawn is not None and result.counts is not None:
            self._drafts.add(requests, num_drawn, result.counts)
        self._drafts.see(requests, accepted, result.drafts, num_drawn is not None)
        failed = result.failed.tolist() if np.count_nonzero(result.failed) else repeat(False, count)
        tops: Iterable[bytes | None] = repeat(None, count)
        if result.logprobs is not None:
            tops = packed_logprobs(requests, result, num_drawn)
        outputs: list[Output] = []
        if result.prompt_logprobs is not None:
            outputs += prompt_outputs(launched.scored, result.prompt_logprobs)
        if launched.pooled:
            outputs += self._commit_pooled(launched.pooled, result)
        drafts: Iterable[list[int]] = repeat([]) if result.drafts is None else result.drafts.tolist()
        for request, admission, num, new, bad, top, proposed in zip(
            requests, launched.admissions, drawn, accepted, failed, tops, drafts, strict=False
        ):
            request.pending -= num
            if num > len(new) and request.admission == admission:
                request.computed -= num - len(new)
                self._arrays.is_stale = True
                if not new:
                    self._cache.take_back(request)
            if request.admission != admission and request.status is Status.FINISHED:
                continue  # this step was launched before the end of the request was known
            if request.session is not None:
                request.session.drafts = proposed if new else []  # a row that sits out has none
                if len(new) > 1:
                    request.session.take_accepted(new, request.stop_ids)
                    top = None if top is None else top[: logprob_bytes(request) * len(new)]
            tokens = request.tokens
            tokens.extend(new)
            may_end = len(tokens) >= request.max_length or not request.stop_ids.isdisjoint(new)
            if new and (may_end or request.repetition is not None):
                num_kept, reason, stop = check_stop(request, len(new))
                if reason is not None:
                    if num_kept < len(new):
                        del tokens[num_kept - len(new) :], new[num_kept:]
                        top = None if top is None else top[: logprob_bytes(request) * num_kept]
                    outputs.append(Output(request.id, request.sample, new, top, reason, stop, request.num_cached))
                    self._lifecycle.finish(request)
                    continue
            if new:
                outputs.append(Output(request.id, request.sample, new, top, None, None, request.num_cached))
            if bad:
                outputs.append(draw_failure(request))
                self._lifecycle.finish(request)
                self._cache.unpublish(request)
                continue
            if len(tokens) > request.publish_after:
                self._cache.publish(request)
            elif request.admission != admission and not request.pending:
                self._waiting.ready(request, WaitFor.TOKENS)  # preempted, and all its tokens are known now
            if len(tokens) > request.short_limit and request.status is Status.RUNNING:
                self._lifecycle.requeue(request)  # all its keys must be computed again, with the long rope factors
        return outputs

    def _commit_pooled(self, requests: list[Request], result: StepResult) -> Iterator[Output]:
        assert len(requests) == len(result.pooled), f"{len(requests)} requests, {len(result.pooled)} results"
        for index, (request, pooled) in enumerate(zip(requests, result.pooled, strict=True)):
            if request.status is Status.FINISHED:
                continue  # aborted
            self._lifecycle.finish(request)
            if index in result.pool_failed:
                self._cache.unpublish(request)
                yield pool_failure(request.id)
            else:
                yield pooled_output(request.id, pooled, request.num_cached)
