"""DraftPlanner: decides how many drafts each row of a plan has, and counts what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from slipstream.config.config import DraftConfig, SchedulerConfig
from slipstream.contracts.request import NEVER, Request
from slipstream.contracts.step import Ints
from slipstream.scheduler.cache.manager import CacheManager, DraftGaps
from slipstream.scheduler.draft_length import DraftClasses, DraftLength
from slipstream.scheduler.plan_builder import PlanBuilder


class DraftPlanner:
    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self.num_drafts = 0 if config.drafts is None else config.drafts.num_drafts  # maximum per row of this plan
        self.num_proposed = self.num_drafts  # per row, for the next plan
        # whether the results of steps have the drafts that they made: those of models exist in every step
        self.sees_drafts = config.drafts is not None and config.drafts.searches
        # None: the number does not change
        most = 0 if config.drafts is None else config.drafts.num_drafts
        self.length = DraftLength(most, sees_drafts=self.sees_drafts) if most else None
        # a model without attention has no pages that hold the tokens of a prefix
        self.sends_history = config.drafts is not None and not cache.groups
        self._cache = cache
        # the buffers of the device are sized for it; without a drafter only tests plan drafts
        self._max_step_drafts = None if config.drafts is None else config.max_step_drafts
        self._left = 0  # drafts that the present plan may still have
        # with an adaptive length
        self.classes = DraftClasses(config.max_num_seqs, config.depth)
        self._rows = 0, -1  # number of running requests in the last plan, and the last of their admissions
        self._numbers: tuple[int, ...] = ()  # drafts per row of this plan, by class
        self._probed_rows: set[int] = set()  # rows of `DraftLength.probed` classes that have drafts in this plan
        self._depth = config.depth
        self._keep_free = 0  # pages that drafts leave: every row may need one in each step before the next commit
        self.counts = DraftCounts(self)
        self.lag = DraftLag.of(config.drafts, cache, config.max_num_batched_tokens)

    def begin_plan(self, running: Sequence[Request]) -> int:
        """Start a plan in which about these rows decode. Returns the maximum number of drafts per row."""
        self._left = 2**30 if self._max_step_drafts is None else self._max_step_drafts
        if self.length is not None:
            self._choose(self.length, running)
        self._keep_free = len(running) * (self._depth + 1)
        return self.num_drafts

    def _choose(self, length: DraftLength, running: Sequence[Request]) -> None:
        rows = len(running), running[-1].admission if running else -1  # a new request is nearly always the last
        if rows == self._rows and length.skip():
            return  # no drafts, as before
        self._rows, self._probed_rows = rows, set()
        counts = self.classes.count(running)
        self._numbers, self.num_proposed = length.choose(counts, lambda: self.classes.count_matched(running))
        self.num_drafts = max(self._numbers)
        if self.num_drafts and length.probed:
            self._probed_rows = self.classes.take_least_tried(running, length.probed, length.num_probed)

    def _wanted(self, request: Request) -> int:
        """Drafts of this row in this plan."""
        if self.length is None:
            return self.num_drafts
        own = self.classes.of(request)
        is_left_out = own in self.length.probed and request.row not in self._probed_rows
        return 0 if is_left_out or self.classes.is_spent(request) else self._numbers[own]

    def num_positions(self, request: Request, room: int, builder: PlanBuilder) -> int:
        """Number of positions of a decode row: one, and drafts, of which there is `room` for so many tokens. Drafts
        take only pages that no row needs soon, so that no request is preempted for them."""
        if not has_drafts(request):
            return 1
        num = min(self._wanted(request), self._left, room)
        if request.session is not None:
            num = min(num, request.session.num_proposed)  # masks are made along drafts that the host knows
        last = min(request.computed + 1 + num, request.last_computed)
        if last > request.capacity:
            spare = max(0, self._cache.num_free - self._keep_free)
            last = min(last, request.capacity + spare * self._cache.page_size)
        if last > request.capacity and (changed := self._cache.reserve(request, last)) is not None:
            builder.change_pages(request.row, changed)
            request.set_decode_limit()
        positions = max(1, min(last, request.capacity) - request.computed)
        self._cache.save_generated(request, request.computed + positions)
        self._left -= positions - 1
        return positions

    def end_plan(self, builder: PlanBuilder) -> None:
        """The plan has all its rows."""
        self._take_drafts_back(builder)
        builder.returns_drafts = self.sees_drafts and self.length is not None
        if self.lag is None:
            return
        if self.num_proposed:
            is_trial = self.length is not None and self.length.is_resting
            builder.catch_up = self.lag.plan(builder, is_trial=is_trial)
        else:
            builder.catch_up = self.lag.skip(builder)

    def _take_drafts_back(self, builder: PlanBuilder) -> None:
        """Recurrent layers compute drafts only in steps of one token per row and draw: if there is a longer chunk, no
        row has drafts."""
        if not self._cache.has_states or not any(chunk.is_drafted for chunk in builder.chunks):
            return
        if all(chunk.is_drafted or chunk.num_tokens == 1 for chunk in builder.chunks):
            return
        for chunk in builder.chunks:
            if chunk.is_drafted:
                chunk.request.computed -= chunk.num_tokens - 1
                chunk.request.pending -= chunk.num_tokens - 1
                builder.decodes.append(chunk.request)
        builder.chunks = [chunk for chunk in builder.chunks if not chunk.is_drafted]


class DraftCounts:
    """Counts of drafts since the start."""

    def __init__(self, planner: DraftPlanner) -> None:
        self._planner = planner
        self.num_rows = 0  # rows with drafts, over all steps
        self.num_drafts = 0
        self.num_accepted = 0
        self.accepted_at: list[int] = []  # number of accepted drafts by their position, the first draft first

    def add(self, requests: Sequence[Request], drawn: list[int], counts: Ints) -> None:
        """Add a step: how many tokens each request drew, and how many it accepted; 0: none, as it sat out or failed."""
        length, kept, classes = self._planner.length, counts.tolist(), [0] * len(drawn)
        if length is not None:
            num_drafts = sum(drawn) - len(drawn)
            cost = length.cost(len(drawn), num_drafts) if num_drafts else 0.0
            classes = self._planner.classes.add(requests, drawn, kept, cost)
        seen = Counter(zip(classes, drawn, kept, strict=True))
        if length is not None:
            tried = {(own, num - 1, count - 1): rows for (own, num, count), rows in seen.items() if num > 1 and count}
            length.add(tried)
        longest = max(drawn, default=1) - 1
        self.accepted_at += [0] * (longest - len(self.accepted_at))
        for (_, num, count), rows in seen.items():
            if num > 1:
                accepted = max(count - 1, 0)
                self.num_rows += rows
                self.num_drafts += rows * (num - 1)
                self.num_accepted += rows * accepted
                for index in range(accepted):
                    self.accepted_at[index] += rows

    def see(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], drafts: Ints | None, has_drafts: bool
    ) -> None:
        """Add what a step has proposed, after `add`: the accepted tokens of each request, and the drafts for its next
        step. `has_drafts`: of the step itself, whose time then counts for them."""
        length = self._planner.length
        if self._planner.sees_drafts and length is not None:
            cost = 0.0 if drafts is None or has_drafts else length.proposal_cost(len(requests))
            self._planner.classes.see(requests, tokens, [] if drafts is None else drafts.tolist(), cost)


def has_drafts(request: Request) -> bool:
    """Whether rows of this request may have drafts. A logits processor sees true tokens, so it can edit the next one
    only; a slow grammar has a mask for the next token only; wide logprobs have room for one token per row; a draft
    model that has not computed the whole request drafts nothing useful."""
    is_slow = request.session is not None and request.session.is_slow
    is_complete = request.drafted == NEVER
    return request.processors is None and not is_slow and not request.params.wide_width and is_complete


# DraftLag: plans which positions a draft model computes, so that it runs only in steps that propose drafts.
#
# In other steps, and in prompts, the draft model's part of the cache falls behind that of the target. The first plan
# that proposes drafts for a request lets the draft model compute the missing positions as a prefill chunk
# (`StepPlan.catch_up`), from the token ids in the pages; until then the request has no drafts. So an engine whose
# drafts do not pay does not pay for the draft model either, and a prompt whose request draws one token is computed
# once.
#
# This needs caches that keep every position: a draft model with a window follows every step, and so does one whose
# pages are copied to a second tier.

TRIAL_TOKENS = 2048  # that the draft model may compute for a trial of drafts; more if one request has more
_NOTHING: Ints = np.zeros((0, 3), np.int32)


class DraftLag:
    def __init__(self, gaps: DraftGaps, max_tokens: int) -> None:
        """`max_tokens`: that the draft model may compute in one step."""
        self.gaps = gaps
        self.max_tokens = max_tokens

    @classmethod
    def of(cls, drafts: DraftConfig | None, cache: CacheManager, max_tokens: int) -> DraftLag | None:
        """None if the drafter runs no model of its own, or must follow every step."""
        if drafts is None or drafts.method != "draft_model" or not cache.keeps_all or cache.tier is not None:
            return None
        cache.draft_gaps = DraftGaps(len(cache.groups), cache.page_size)
        return cls(cache.draft_gaps, max_tokens)

    def skip(self, builder: PlanBuilder) -> Ints:
        """A plan in which the draft model does not run. Returns what `plan` returns."""
        for request in builder.decodes:
            if request.drafted == NEVER:
                # positions after the last known token may hold entries of drafts that were rejected
                request.drafted = len(request.tokens) - 1
        for chunk in builder.chunks:
            self.gaps.open(chunk.request, len(chunk.request.tokens) - 1 if chunk.is_drafted else chunk.start)
        return _NOTHING

    def plan(self, builder: PlanBuilder, *, is_trial: bool) -> Ints:
        """A plan that proposes drafts. Returns the positions that the draft model computes first: [n, 3] (row, first
        position, number). The positions that tokens are drawn from are not among them: it computes these in any
        case."""
        behind = [(request, 1) for request in builder.decodes if request.drafted != NEVER]
        for chunk in builder.chunks:
            if not chunk.is_drafted:
                self.gaps.open(chunk.request, chunk.start)
            if chunk.num_drawn and chunk.request.drafted != NEVER:
                behind.append((chunk.request, chunk.num_drawn))
        if not behind:
            return _NOTHING
        # fewest first: most requests have drafts soon
        missing = [(request.computed - num_drawn - request.drafted, request) for request, num_drawn in behind]
        missing.sort(key=lambda pair: pair[0])
        left = self.max_tokens
        if is_trial:
            left = min(left, max(TRIAL_TOKENS, missing[0][0]))
        planned = []
        for wanted, request in missing:
            num = max(0, min(wanted, left))
            if num:
                planned.append((request.row, request.drafted, num))
                left -= num
            if num < wanted:
                self.gaps.fill(request, request.drafted + num)
            else:
                self.gaps.fill(request, request.computed)
                request.drafted = NEVER
        return np.array(planned, np.int32) if planned else _NOTHING
