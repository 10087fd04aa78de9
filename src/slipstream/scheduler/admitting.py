"""Admitter: gives waiting requests a row, pages and their first chunk, while the step has room."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import NEVER, Request, WaitFor
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.budget import Budget
from slipstream.scheduler.cache.manager import CacheManager, Hit
from slipstream.scheduler.plan_builder import PlanBuilder
from slipstream.scheduler.prefill_chunks import add_chunk, fit_chunk, num_chunk_tokens
from slipstream.scheduler.row_allocator import RowAllocator
from slipstream.scheduler.sibling_samples import detach_from_leader, leader_to_fork
from slipstream.scheduler.waiting import WaitingQueue


class Admitter:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        waiting: WaitingQueue,
        row_allocator: RowAllocator,
        adapters: Adapters[Request] | None,
        *,
        sends_history: bool,
    ) -> None:
        """`sends_history`: whether admissions upload the tokens of cached prefixes, for drafts."""
        self.begun: list[str] = []  # generation requests that were admitted for the first time
        self._config = config
        self._cache = cache
        self._waiting = waiting
        self._row_allocator = row_allocator
        self._adapters = adapters
        self._sends_history = sends_history

    def admit_waiting(self, builder: PlanBuilder, budget: Budget, refill: Callable[[int], int] | None) -> None:
        """Admit waiting requests in the queue's order. A smaller request does not overtake the first one.

        `refill`: submits up to the given number of further requests, and returns how many."""
        cache = self._cache
        while budget.tokens and budget.rows:
            # every running row may need a page in each step that is launched before a result is committed
            watermark = len(self._row_allocator.running) * (self._config.depth + 1)
            if cache.num_free <= watermark or (builder and cache.has_enough_loads):
                return
            request = self._waiting.first()
            if request is None and refill is not None and refill(1):
                request = self._waiting.first()  # None if the new request waits for something else
            if request is None or not self._row_allocator.can_share_tables(request, self._config.max_step_logprobs):
                return
            if self._adapters is not None and not self._adapters.can_admit(request):
                self._waiting.hold(request, WaitFor.ADAPTER)  # requests behind it are admitted
                continue
            if not self._admit(request, watermark, builder, budget):
                cache.keep_match(request)
                return

    def _admit(self, request: Request, watermark: int, builder: PlanBuilder, budget: Budget) -> bool:
        """Admit a request and plan its first chunk. Returns False and changes nothing if there is no room for it."""
        cache, config, known = self._cache, self._config, len(request.tokens)
        if config.short_rope is not None:
            request.choose_rope(config.short_rope)
        hit = self._hit(request, builder.step)
        num = num_chunk_tokens(request, hit.length, known, builder, config)
        if not num or (num > budget.tokens and not config.chunked_prefill):
            return False
        num = fit_chunk(hit.length, num, budget.tokens, cache.border)
        length = hit.length + num
        entries = cache.num_table_entries(length)
        has_history = request.params.needs_history or (self._sends_history and hit.length)
        num_ints = request.num_staged_ids + (known if has_history else 0)
        if not budget.can_stage(entries, num_ints):
            return False
        changed = cache.admit(request, length, hit, keep_free=watermark, known=known)
        if changed is None:
            return False
        budget.admit(num, entries, num_ints)
        if not request.num_preemptions:  # recomputing after a preemption is not charged to the caller
            self._waiting.charge(request, known - hit.length)
        self._waiting.remove(request)
        self._assign_row(request, hit, builder)
        builder.change_pages(request.row, changed)
        add_chunk(request, num, builder, cache)
        return True

    def _hit(self, request: Request, step: int) -> Hit:
        """The prefix of a waiting request that need not be computed."""
        if request.next_scored != NEVER or (request.pooling and request.pooling.task not in self._config.cached_tasks):
            return self._cache.no_hit  # its results are made of hidden states, which are not cached
        leader = leader_to_fork(request, step)
        fork = None if leader is None else self._cache.fork(request, leader)
        if fork is not None:
            return fork
        return self._cache.no_hit if request.params.skip_reading_prefix_cache else self._cache.match(request)

    def _assign_row(self, request: Request, hit: Hit, builder: PlanBuilder) -> None:
        """Assign a row to a request whose pages are reserved."""
        for group, page in enumerate(hit.partial):
            builder.copies.append((group, page, request.pages[group][len(hit.pages[group])]))
        if not request.num_preemptions:
            request.num_cached = hit.length
            if not request.sample and request.pooling is None:
                self.begun.append(request.id)
        if request.leader is not None:
            detach_from_leader(request)
        self._row_allocator.assign(request, hit.length)
        if self._adapters is not None:
            self._adapters.admit(request, request.row)
        builder.admit(request)
