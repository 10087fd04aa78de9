"""Rows of several positions: prefill chunks, and drawn tokens followed by drafts."""

from __future__ import annotations

from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import NEVER, Request
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.plan_builder import Chunk, PlanBuilder


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
