"""What a step's numbers become for those who asked for them: outputs, without any decision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from slipstream.messages import LOGPROB, Output, Pooled
from slipstream.params import MAX_PACKED_LOGPROBS
from slipstream.request import FinishReason, Request, Status
from slipstream.step import Floats, Ints, StepLogprobs, StepResult

_STOP = FinishReason.STOP


def accepted_tokens(result: StepResult, drawn: list[int] | None, count: int) -> list[list[int]]:
    """The tokens that each of `count` sampling rows keeps of those it drew. `drawn`: how many; None: one each.

    A row that failed keeps what it drew before: nothing, where it drew one token.
    """
    tokens: list[int] = result.tokens.tolist()
    total = count if drawn is None else sum(drawn)
    assert len(tokens) == total, f"{total} tokens were to be drawn for {count} rows, the result has {len(tokens)}"
    if drawn is None:
        accepted = [[token] for token in tokens]
        for place in result.failed.nonzero()[0].tolist():
            accepted[place] = []
        return accepted
    return [tokens[own] for own in _kept(drawn, result)]


def logprob_reports(requests: list[Request], result: StepResult, drawn: list[int] | None = None) -> list[bytes | None]:
    """For each request what it asked for, of the tokens it keeps. `drawn`: how many it drew; None: one each."""
    logprobs = result.logprobs
    assert logprobs is not None
    owners = requests
    if drawn is not None:
        owners = [request for request, num in zip(requests, drawn, strict=True) for _ in range(num)]
    reports = _reports([request.num_logprobs for request in owners], result.tokens, logprobs)
    if logprobs.given is not None:
        asking = (place for place, request in enumerate(owners) if request.params.given_ids)
        for place, given in zip(asking, logprobs.given, strict=True):
            reports[place] = (reports[place] or b"") + _pack_given(owners[place].params.given_ids, given)
    if drawn is None:
        return reports
    parts = (reports[own] for own in _kept(drawn, result))
    return [None if None in part else b"".join(part) for part in parts]  # type: ignore[arg-type]


def _kept(drawn: list[int], result: StepResult) -> Iterator[slice]:
    """Where the tokens that each sampling row keeps are among all that were drawn."""
    counts = drawn if result.counts is None else result.counts.tolist()
    for start, count in zip(itertools.accumulate(drawn[:-1], initial=0), counts, strict=True):
        yield slice(start, start + count)


def logprob_bytes(request: Request) -> int:
    """Of one token's report."""
    own = 0 if request.num_logprobs is None else _size(request.num_logprobs)
    return own + len(request.params.given_ids) * LOGPROB.itemsize


def _reports(wanted: list[int | None], tokens: Ints, logprobs: StepLogprobs) -> list[bytes | None]:
    """`wanted`: likeliest tokens for each row; None: it wants nothing."""
    if len(set(wanted)) == 1 and wanted[0] is not None and wanted[0] <= MAX_PACKED_LOGPROBS:  # mostly
        packed, size = _pack(tokens, logprobs, slice(None), wanted[0]), _size(wanted[0])
        return [packed[start : start + size] for start in range(0, len(packed), size)]
    reports: list[bytes | None] = [None] * len(wanted)
    kinds: dict[int, list[int]] = {}  # places of those who want few, and of those who want just so many
    for place, k in enumerate(wanted):
        if k is not None:
            kinds.setdefault(max(k, MAX_PACKED_LOGPROBS), []).append(place)
    of_long = (place for place, k in enumerate(wanted) if k is not None and k > MAX_PACKED_LOGPROBS)
    entry_of = {place: entry for entry, place in enumerate(of_long)}  # among the long reports, which lie apart
    for kind, places in kinds.items():
        most = max(wanted[place] or 0 for place in places)
        source, entries = logprobs, places
        if kind > MAX_PACKED_LOGPROBS:
            assert logprobs.long is not None
            source, entries = logprobs.long, [entry_of[place] for place in places]
        packed = _pack(tokens[places], source, entries, most)
        for start, place in zip(range(0, len(packed), _size(most)), places, strict=True):
            reports[place] = packed[start : start + _size(wanted[place] or 0)]  # the first of them
    return reports


def _size(k: int) -> int:
    """Bytes of a token's own logprob and of those of the k likeliest."""
    return (1 + k) * LOGPROB.itemsize


def _pack(tokens: Ints, logprobs: StepLogprobs, entries: slice | list[int], k: int) -> bytes:
    """LOGPROBs of some entries, [entries, 1 + k]; `tokens` are those they belong to."""
    packed = np.empty((len(tokens), 1 + k), LOGPROB)
    values, ids, ranks = packed["logprob"], packed["token"], packed["rank"]
    values[:, 0], values[:, 1:] = logprobs.chosen[entries], logprobs.top[entries, :k]
    ids[:, 0], ids[:, 1:] = tokens, logprobs.top_ids[entries, :k]
    ranks[:, 0], ranks[:, 1:] = logprobs.rank[entries], np.arange(1, k + 1)
    return packed.tobytes()


def _pack_given(ids: tuple[int, ...], logprobs: Floats) -> bytes:
    packed = np.zeros(len(ids), LOGPROB)
    packed["logprob"], packed["token"] = logprobs[: len(ids)], ids
    return packed.tobytes()


def prompt_reports(scored: Sequence[tuple[Request, int, int]], logprobs: StepLogprobs) -> Iterator[Output]:
    """What a step says of prompts, for those that still want to hear it."""
    start = 0
    for request, first, num in scored:
        own = slice(start, start + num)
        start += num
        if request.status is Status.FINISHED:
            continue
        k = request.params.prompt_logprobs or 0
        tokens = np.array(request.tokens[first : first + num], np.int32)
        report = _pack(tokens, logprobs, own, k)
        yield Output(request.id, request.sample, [], num_cached_tokens=request.num_cached, prompt_logprobs=report)


def pooled_report(request_id: str, result: Floats, num_cached: int = 0) -> Output:
    # by place and not by name, which takes half as long again: there are many of these in a step
    return Output(request_id, 0, [], None, _STOP, None, num_cached, None, None, Pooled.of(result))


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
