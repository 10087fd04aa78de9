"""DraftLag: plans which positions a draft model computes, so that it runs only in steps that propose drafts.

In other steps, and in prompts, the draft model's part of the cache falls behind that of the target. The first plan that
proposes drafts for a request lets the draft model compute the missing positions as a prefill chunk
(`StepPlan.catch_up`), from the token ids in the pages; until then the request has no drafts. So an engine whose drafts
do not pay does not pay for the draft model either, and a prompt whose request draws one token is computed once.

This needs caches that keep every position: a draft model with a window follows every step, and so does one whose pages
are copied to a second tier.
"""

from __future__ import annotations

import numpy as np

from slipstream.config.config import DraftConfig
from slipstream.contracts.request import NEVER
from slipstream.contracts.step import Ints
from slipstream.scheduler.cache.draft_gaps import DraftGaps
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.plan_builder import PlanBuilder

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
