"""What a step's numbers become for those who asked for them: outputs, without any decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.messages import Output, Pooled, TokenLogprobs
from slipstream.request import FinishReason, Request, Status
from slipstream.step import Floats, StepLogprobs


def logprob_reports(requests: list[Request], logprobs: StepLogprobs) -> list[list[TokenLogprobs] | None]:
    """For each request what it asked for; the step reports as many as the most curious of its rows wants."""
    chosen, rank = logprobs.chosen.tolist(), logprobs.rank.tolist()
    top_ids, top = logprobs.top_ids, logprobs.top
    given = iter(() if logprobs.given is None else logprobs.given)
    reports: list[list[TokenLogprobs] | None] = []
    for i, request in enumerate(requests):
        k = request.params.num_logprobs
        if k is None:
            reports.append(None)
            continue
        num_given = len(request.params.given_ids)
        own = next(given)[:num_given].tolist() if num_given else []
        reports.append([TokenLogprobs(chosen[i], rank[i], top_ids[i, :k].tolist(), top[i, :k].tolist(), own)])
    return reports


def prompt_reports(scored: Sequence[tuple[Request, int]], logprobs: StepLogprobs) -> Iterator[Output]:
    """What a step says of prompts, for those that still want to hear it."""
    chosen, rank = logprobs.chosen.tolist(), logprobs.rank.tolist()
    start = 0
    for request, num in scored:
        places = range(start, start + num)
        start += num
        if request.status is Status.FINISHED:
            continue
        k = request.params.prompt_logprobs or 0
        report = [
            TokenLogprobs(chosen[i], rank[i], logprobs.top_ids[i, :k].tolist(), logprobs.top[i, :k].tolist())
            for i in places
        ]
        yield Output(request.id, request.sample, [], num_cached_tokens=request.num_cached, prompt_logprobs=report)


def pooled_report(request_id: str, result: Floats, num_cached: int = 0) -> Output:
    return Output(
        request_id, 0, [], None, FinishReason.STOP, num_cached_tokens=num_cached, pooled=Pooled.of(result)
    )  # fmt: skip


def pool_failure(request_id: str) -> Output:
    return _failure(
        request_id,
        "the pooled result of this request is not made of numbers: weights or activations were NaN or infinite; "
        "others are not affected",
    )


def lost_query(request_id: str) -> Output:
    return _failure(
        request_id,
        "its query was given up before it was computed, so it cannot be scored against it; submit both again",
    )


def draw_failure(request: Request) -> Output:
    return _failure(
        request.id,
        f"no token could be drawn for position {len(request.tokens)} of this request: the model gave values that are "
        f"not numbers, or the parameters forbid every token; others are not affected",
        sample=request.sample,
        num_cached=request.num_cached,
    )


def _failure(request_id: str, error: str, *, sample: int = 0, num_cached: int = 0) -> Output:
    return Output(
        request_id, sample, [], finish_reason=FinishReason.ERROR, num_cached_tokens=num_cached, error=error
    )  # fmt: skip
