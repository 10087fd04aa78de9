"""A piece of known tokens in a step: how long it is, and what comes of it besides cache content."""

from __future__ import annotations

from slipstream.request import NEVER, Request
from slipstream.scheduler.plan_builder import Chunk, PlanBuilder

_SCORED_AT_ONCE = 2**20  # prompt logprobs that one request reports in one step, where its prompt may be cut


def num_wanted(request: Request, start: int, known: int, *, may_cut: bool) -> int:
    """The known tokens it has not computed; those of a long report only so many at a time."""
    num = known - start
    if request.unscored != NEVER and may_cut:
        num = min(num, max(1, _SCORED_AT_ONCE // max(1, request.params.prompt_logprobs or 0)))
    return num


def add_chunk(request: Request, num: int, builder: PlanBuilder) -> None:
    """Compute `num` known tokens. After the last of them a token is drawn, or the prompt is pooled."""
    start = request.computed
    request.computed = start + num
    is_last = request.computed == request.num_known
    samples = is_last and request.pooling is None
    if samples:
        request.pending += 1
        request.caught_up = builder.step
        request.set_runway()
    first, num_scored = 0, 0
    if request.unscored != NEVER:
        first = request.unscored
        num_scored = max(0, min(request.computed, request.num_prompt - 1) + 1 - first)
        request.unscored = first + num_scored if first + num_scored < request.num_prompt else NEVER
    builder.chunks.append(Chunk(request, start, num, samples, is_last and not samples, first, num_scored))
