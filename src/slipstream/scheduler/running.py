"""RunningPlanner: gives each running request its next positions, and preempts requests when pages run out."""

from __future__ import annotations

from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import Request
from slipstream.scheduler.budget import Budget
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.drafting import DraftPlanner
from slipstream.scheduler.lifecycle import RequestLifecycle
from slipstream.scheduler.plan_builder import PlanBuilder
from slipstream.scheduler.prefill_chunks import add_chunk, add_drafted, fit_chunk, num_chunk_tokens
from slipstream.scheduler.row_allocator import RowAllocator


class RunningPlanner:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        row_allocator: RowAllocator,
        lifecycle: RequestLifecycle,
        drafts: DraftPlanner,
    ) -> None:
        self.num_preemptions = 0
        self._config = config
        self._cache = cache
        self._row_allocator = row_allocator
        self._lifecycle = lifecycle
        self._drafts = drafts

    def limit_prefill(self, budget: Budget, max_num_tokens: int | None) -> None:
        """Limit prefill tokens to `max_num_tokens` while rows decode. At least one prefill token is allowed."""
        if max_num_tokens is None or max_num_tokens >= budget.tokens or not self._config.chunked_prefill:
            return
        if num_decodes := self._count_decodes():
            budget.tokens = min(budget.tokens, max(max_num_tokens, num_decodes + 1))

    def plan(self, builder: PlanBuilder, budget: Budget) -> bool:
        """Plan the running requests. False if a request was preempted: then no waiting request is admitted."""
        running, decodes = self._row_allocator.running, builder.decodes
        num_preemptions = self.num_preemptions
        left, num_drafts = budget.tokens, self._drafts.begin_plan(running)
        num_waiting = -1  # decodes that are not planned yet: chunks and drafts must leave one token for each
        # A request that lacks pages preempts requests from the end of this list, which are not planned yet.
        for request in running:
            if not left:
                break
            start = request.computed
            if start >= request.decode_limit:
                if request.held:
                    continue
                if start < request.num_known:
                    if num_waiting < 0:
                        num_waiting = self._count_decodes() - len(decodes)
                    wanted = num_chunk_tokens(request, start, request.num_known, builder, self._config)
                    num = fit_chunk(start, wanted, left - num_waiting, self._cache.border)
                    if num <= 0:
                        if builder:
                            continue
                        num = 1  # the first running request always makes progress
                    if start + num > request.capacity and not self._make_room(request, start + num, builder):
                        return False
                    add_chunk(request, num, builder, self._cache)
                    left -= num
                    continue
                if start + 1 >= request.max_length:
                    continue  # its last token is in flight
                if start >= request.short_limit:
                    continue  # its next position needs the long rope factors: see `Scheduler.commit`
                if not self._make_room(request, start + 1, builder):
                    return False
                request.set_decode_limit()
            # All known tokens are launched: plan the token drawn last, and its drafts.
            num = 1
            if num_drafts:
                if num_waiting < 0:
                    num_waiting = self._count_decodes() - len(decodes)
                num_waiting -= 1
                num = self._drafts.num_positions(request, left - 1 - num_waiting, builder)
            elif num_waiting > 0:
                num_waiting -= 1
            left -= num
            if num > 1:
                add_drafted(request, num, builder)
                continue
            request.computed = start + 1
            request.pending += 1
            decodes.append(request)
        budget.tokens = left
        return self.num_preemptions == num_preemptions

    def _count_decodes(self) -> int:
        """Running requests whose known tokens are all launched."""
        return sum(1 for request in self._row_allocator.running if request.computed >= request.num_known)

    def _make_room(self, request: Request, length: int, builder: PlanBuilder) -> bool:
        """Reserve pages, preempting requests from the end of the list; False if the request itself came up there.

        Then it is preempted, or, if it will give back pages once steps in flight are committed, keeps its row and
        waits.
        """
        while (changed := self._cache.reserve(request, length)) is None:
            victim = self._row_allocator.running[-1]
            if victim is request and self._cache.will_free_pages(request):
                return False
            self.preempt(victim)
            if victim is request:
                return False
        builder.change_pages(request.row, changed)
        return True

    def preempt(self, request: Request) -> None:
        """Release the row and the pages of a running request, which returns to the queue."""
        self.num_preemptions += 1
        self._lifecycle.requeue(request)
