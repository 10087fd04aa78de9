"""Rows of several positions in a step: a part of a prompt, or a token with drafts behind it."""

from __future__ import annotations

from slipstream.config.config import SchedulerConfig
from slipstream.request import NEVER, Request
from slipstream.scheduler.plan_builder import Chunk, PlanBuilder


def num_chunk_tokens(request: Request, start: int, known: int, builder: PlanBuilder, config: SchedulerConfig) -> int:
    """The known tokens it has not computed; of a prompt to be scored as many as the step has room to report on, which
    may be none if others are scored in it."""
    first = request.unscored
    if first == NEVER:
        return known - start
    room = builder.score_room(request, config.max_reported)
    if min(known, request.num_prompt - 1) + 1 - first <= room:
        return known - start
    return max(0, room + first - 1 - start) if config.chunked_prefill else 0


def add_chunk(request: Request, num: int, builder: PlanBuilder) -> None:
    """Compute `num` known tokens. After the last of them a token is drawn, or the prompt is pooled."""
    start = request.computed
    request.computed = start + num
    is_last = request.computed == request.num_known
    num_drawn = int(is_last and request.pooling is None)
    if num_drawn:
        request.pending += 1
        request.caught_up = builder.step
        request.set_runway()
    first, num_scored = 0, 0
    if request.unscored != NEVER:
        first = request.unscored
        num_scored = max(0, min(request.computed, request.num_prompt - 1) + 1 - first)
        request.unscored = first + num_scored if first + num_scored < request.num_prompt else NEVER
    builder.add(Chunk(request, start, num, num_drawn, is_last and not num_drawn, first, num_scored))


def add_drafted(request: Request, num: int, builder: PlanBuilder) -> None:
    """Compute the token that the request drew last and `num - 1` drafts, and draw a token after each."""
    start = request.computed
    request.computed = start + num
    request.pending += num
    builder.add(Chunk(request, start, num, num, is_drafted=True))
