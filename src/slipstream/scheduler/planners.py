"""RunningPlanner: gives each running request its next positions, and preempts requests when pages run out."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import NEVER, Request, WaitFor
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.manager import CacheManager, Hit
from slipstream.scheduler.drafting import DraftPlanner
from slipstream.scheduler.images import ImageSlots
from slipstream.scheduler.lifecycle import RequestLifecycle, RowAllocator, detach_from_leader, leader_to_fork
from slipstream.scheduler.plan_builder import Chunk, PlanBuilder
from slipstream.scheduler.waiting import PromptSources, WaitingQueue


class RunningPlanner:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        row_allocator: RowAllocator,
        lifecycle: RequestLifecycle,
        drafts: DraftPlanner,
        images: ImageSlots | None,
    ) -> None:
        self.num_preemptions = 0
        self._config = config
        self._cache = cache
        self._row_allocator = row_allocator
        self._lifecycle = lifecycle
        self._drafts = drafts
        self._images = images

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
                    room = left - num_waiting
                    if self._images is not None and request.images is not None:
                        plannable = self._images.num_plannable(request, start, min(wanted, max(room, 1)))
                        if not plannable:
                            continue
                        room = min(room, plannable)
                    num = fit_chunk(start, wanted, room, self._cache.border)
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


# Admitter: gives waiting requests a row, pages and their first chunk, while the step has room.


class Admitter:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        waiting: WaitingQueue,
        row_allocator: RowAllocator,
        adapters: Adapters[Request] | None,
        images: ImageSlots | None,
        *,
        sends_history: bool,
    ) -> None:
        """`sends_history`: whether admissions upload the tokens of cached prefixes, for drafts."""
        self.begun: list[str] = []  # generation requests that were admitted for the first time
        self._put_off: list[Request] = []  # that wait for the next plan, to encode their first image
        self._config = config
        self._cache = cache
        self._waiting = waiting
        self._row_allocator = row_allocator
        self._adapters = adapters
        self._images = images
        self._sends_history = sends_history

    def admit_waiting(self, builder: PlanBuilder, budget: Budget, sources: PromptSources[Sequence[Request]]) -> None:
        """Admit waiting requests in the queue's order, then prompts of `sources`. A smaller request does not overtake
        the first one."""
        cache = self._cache
        while budget.tokens and budget.rows:
            # every running row may need a page in each step that is launched before a result is committed
            watermark = len(self._row_allocator.running) * (self._config.depth + 1)
            if cache.num_free <= watermark or (builder and cache.has_enough_loads):
                return
            request = self._waiting.first()
            if request is None and sources and sources.take(1):
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
        """Admit a request and plan its first chunk, or put it off for its image. Returns False and changes nothing if
        there is no room for it."""
        cache, config, known = self._cache, self._config, len(request.tokens)
        if config.short_rope is not None:
            request.choose_rope(config.short_rope)
        hit = self._hit(request, builder.step)
        num, room = num_chunk_tokens(request, hit.length, known, builder, config), budget.tokens
        if not num or (num > room and not config.chunked_prefill):
            return False
        if self._images is not None and request.images is not None:
            room = self._images.num_plannable(request, hit.length, min(num, room))
            if not room:
                self._images.release(request)
                self._waiting.hold(request, WaitFor.IMAGE)  # requests behind it are admitted
                self._put_off.append(request)
                return True
        num = fit_chunk(hit.length, num, room, cache.border)
        length = hit.length + num
        entries = cache.num_table_entries(length)
        has_history = request.params.needs_history or (self._sends_history and hit.length)
        num_ints = request.num_staged_ids + (known if has_history else 0)
        changed = None
        if budget.can_stage(entries, num_ints):
            changed = cache.admit(request, length, hit, keep_free=watermark, known=known)
        if changed is None:
            if self._images is not None:
                self._images.release(request)
            return False
        budget.admit(num, entries, num_ints)
        if not request.num_preemptions:  # recomputing after a preemption is not charged to the caller
            self._waiting.charge(request, known - hit.length)
        self._waiting.remove(request)
        self._assign_row(request, hit, builder)
        builder.change_pages(request.row, changed)
        add_chunk(request, num, builder, cache)
        return True

    def take_put_off(self) -> list[Request]:
        """Requests that the last plan put off. Each is returned once."""
        put_off, self._put_off = self._put_off, []
        return put_off

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


# Rows of several positions: prefill chunks, and drawn tokens followed by drafts.


def num_chunk_tokens(request: Request, start: int, known: int, builder: PlanBuilder, config: SchedulerConfig) -> int:
    """Number of known tokens that are not computed yet. For a prompt with prompt_logprobs, limited by the room that is
    left in the step's result; 0 if there is none."""
    first = request.next_scored
    if first == NEVER:
        return known - start
    room = builder.score_room(request, config.max_step_logprobs)
    if min(known, request.num_prompt - 1) + 1 - first <= room:
        return known - start
    return max(0, room + first - 1 - start) if config.chunked_prefill else 0


def fit_chunk(start: int, wanted: int, room: int, border: int) -> int:
    """Number of tokens of a chunk that begins at `start`: at most `wanted` and `room`. A chunk that is not the last one
    ends at a multiple of `border` if it reaches one: recurrent kernels then cut every prompt at the same positions."""
    if wanted <= room:
        return wanted
    return (start + room) // border * border - start if (start + room) // border > start // border else room


def add_chunk(request: Request, num: int, builder: PlanBuilder, cache: CacheManager) -> None:
    """Plan `num` known tokens. After the last known token, draw a token or pool the prompt."""
    start = request.computed
    request.computed = start + num
    is_last = request.computed == request.num_known
    num_drawn = int(is_last and request.pooling is None)
    if num_drawn:
        request.pending += 1
        request.known_launched_at = builder.step
        request.set_decode_limit()
    first, num_scored = 0, 0
    if request.next_scored != NEVER:
        first = request.next_scored
        num_scored = max(0, min(request.computed, request.num_prompt - 1) + 1 - first)
        request.next_scored = first + num_scored if first + num_scored < request.num_prompt else NEVER
    builder.add(Chunk(request, start, num, num_drawn, is_last and not num_drawn, first, num_scored))
    cache.publish_chunk(request)  # within a step, writes come before reads: others may use its pages at once


def add_drafted(request: Request, num: int, builder: PlanBuilder) -> None:
    """Plan the token that the request drew last and `num - 1` drafts, and draw a token after each."""
    start = request.computed
    request.computed = start + num
    request.pending += num
    builder.add(Chunk(request, start, num, num, is_drafted=True))


# Budget: the resources of one step that are not used yet.

INTS_PER_PAGE = 3  # a page update is a row, an entry and a page


class Budget:
    """Tokens to compute, free rows, and integers that admissions may upload.

    The device's upload arena has a fixed size, computed from `staged_ints`. Page-table entries, histories and id lists
    of many admissions could overflow it, so they are counted. The first admission of a step always fits: it would not
    become smaller by waiting. So `staged_ints` must be at least what the largest single request needs: 3 for each of
    its pages in every group, the model length once for a history, and its ids.
    """

    __slots__ = ("tokens", "rows", "ints", "_limit")

    def __init__(self, config: SchedulerConfig, free_rows: int) -> None:
        self.tokens = config.max_num_batched_tokens
        self.rows = free_rows
        self.ints = self._limit = config.staged_ints

    def can_stage(self, num_entries: int, num_ints: int) -> bool:
        return self._cost(num_entries, num_ints) <= self.ints

    def admit(self, tokens: int, num_entries: int, num_ints: int) -> None:
        """Subtract one admission; `num_ints` counts its history and its ids."""
        self.tokens -= tokens
        self.rows -= 1
        self.ints -= self._cost(num_entries, num_ints)
        assert min(self.tokens, self.rows, self.ints) >= 0, f"overspent: {self.tokens}, {self.rows}, {self.ints}"

    def _cost(self, num_entries: int, num_ints: int) -> int:
        return min(num_entries * INTS_PER_PAGE + num_ints, self._limit)
