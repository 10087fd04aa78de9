"""Converts step results to outputs: accepted tokens, packed logprobs, pooled results, failures."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.contracts.messages import LOGPROB, Output, Pooled
from slipstream.contracts.request import FinishReason, Request, Status
from slipstream.contracts.step import Floats, Ints, StepLogprobs, StepResult
from slipstream.params.sampling import MAX_PACKED_LOGPROBS

_STOP = FinishReason.STOP


def accepted_tokens(result: StepResult, drawn: list[int] | None, count: int) -> list[list[int]]:
    """The accepted tokens of each of `count` sampling rows. `drawn`: how many tokens each row drew; None: one each.

    A row that failed keeps what it drew before: nothing, where it drew one token.
    """
    tokens: list[int] = result.tokens.tolist()
    total = count if drawn is None else sum(drawn)
    assert len(tokens) == total, f"{total} tokens were to be drawn for {count} rows, the result has {len(tokens)}"
    if drawn is None:
        accepted = [[token] for token in tokens]
        for index in result.failed.nonzero()[0].tolist():
            accepted[index] = []
        return accepted
    return [tokens[own] for own in _kept(drawn, result)]


def packed_logprobs(requests: list[Request], result: StepResult, drawn: list[int] | None = None) -> list[bytes | None]:
    """Packed logprobs of the accepted tokens of each request, as it asked for them; `drawn` as above."""
    logprobs = result.logprobs
    assert logprobs is not None
    owners = requests
    if drawn is not None:
        owners = [request for request, num in zip(requests, drawn, strict=True) for _ in range(num)]
    packed = _pack_all([request.num_logprobs for request in owners], result.tokens, logprobs)
    if logprobs.requested is not None:
        asking = (index for index, request in enumerate(owners) if request.params.requested_ids)
        for index, values in zip(asking, logprobs.requested, strict=True):
            packed[index] = (packed[index] or b"") + _pack_requested(owners[index].params.requested_ids, values)
    if drawn is None:
        return packed
    parts = (packed[own] for own in _kept(drawn, result))
    return [None if None in part else b"".join(part) for part in parts]  # type: ignore[arg-type]


def _kept(drawn: list[int], result: StepResult) -> Iterator[slice]:
    """The slice of each sampling row's accepted tokens in the list of all drawn tokens."""
    assert result.counts is not None, "the result of a step with drafts does not say which tokens are accepted"
    for start, count in zip(itertools.accumulate(drawn[:-1], initial=0), result.counts.tolist(), strict=True):
        yield slice(start, start + count)


def logprob_bytes(request: Request) -> int:
    """Bytes of the packed logprobs of one token."""
    own = 0 if request.num_logprobs is None else _size(request.num_logprobs)
    return own + len(request.params.requested_ids) * LOGPROB.itemsize


def _pack_all(wanted: list[int | None], tokens: Ints, logprobs: StepLogprobs) -> list[bytes | None]:
    """`wanted`: number of likeliest tokens per drawn token; None: no logprobs."""
    if len(set(wanted)) == 1 and wanted[0] is not None and wanted[0] <= MAX_PACKED_LOGPROBS:  # the usual case
        packed, size = _pack(tokens, logprobs, slice(None), wanted[0]), _size(wanted[0])
        return [packed[start : start + size] for start in range(0, len(packed), size)]
    by_token: list[bytes | None] = [None] * len(wanted)
    kinds: dict[int, list[int]] = {}  # indices by width: all packed rows together, wide rows by their width
    for index, k in enumerate(wanted):
        if k is not None:
            kinds.setdefault(max(k, MAX_PACKED_LOGPROBS), []).append(index)
    of_wide = (index for index, k in enumerate(wanted) if k is not None and k > MAX_PACKED_LOGPROBS)
    entry_of = {index: entry for entry, index in enumerate(of_wide)}  # index among the wide rows, which are apart
    for kind, indices in kinds.items():
        k_max = max(wanted[index] or 0 for index in indices)
        source, entries = logprobs, indices
        if kind > MAX_PACKED_LOGPROBS:
            assert logprobs.wide is not None
            source, entries = logprobs.wide, [entry_of[index] for index in indices]
        packed = _pack(tokens[indices], source, entries, k_max)
        for start, index in zip(range(0, len(packed), _size(k_max)), indices, strict=True):
            by_token[index] = packed[start : start + _size(wanted[index] or 0)]  # the likeliest come first
    return by_token


def _size(k: int) -> int:
    """Bytes of a token's own logprob and those of the k likeliest tokens."""
    return (1 + k) * LOGPROB.itemsize


def _pack(tokens: Ints, logprobs: StepLogprobs, entries: slice | list[int], k: int) -> bytes:
    """The LOGPROB records [entries, 1 + k] of some entries; `tokens` are the tokens of these entries."""
    packed = np.empty((len(tokens), 1 + k), LOGPROB)
    values, ids, ranks = packed["logprob"], packed["token"], packed["rank"]
    values[:, 0], values[:, 1:] = logprobs.chosen[entries], logprobs.top[entries, :k]
    ids[:, 0], ids[:, 1:] = tokens, logprobs.top_ids[entries, :k]
    ranks[:, 0], ranks[:, 1:] = logprobs.rank[entries], np.arange(1, k + 1)
    return packed.tobytes()


def _pack_requested(ids: tuple[int, ...], logprobs: Floats) -> bytes:
    packed = np.zeros(len(ids), LOGPROB)
    packed["logprob"], packed["token"] = logprobs[: len(ids)], ids
    return packed.tobytes()


def prompt_outputs(scored: Sequence[tuple[Request, int, int]], logprobs: StepLogprobs) -> Iterator[Output]:
    """Outputs with the logprobs of scored prompt tokens, for requests that have not ended."""
    start = 0
    for request, first, num in scored:
        own = slice(start, start + num)
        start += num
        if request.status is Status.FINISHED:
            continue
        k = request.params.prompt_logprobs or 0
        tokens = np.array(request.tokens[first : first + num], np.int32)
        packed = _pack(tokens, logprobs, own, k)
        yield Output(request.id, request.sample, [], num_cached_tokens=request.num_cached, prompt_logprobs=packed)


def pooled_output(request_id: str, result: Floats, num_cached: int = 0) -> Output:
    # positional arguments: keywords take 1.5 times as long, and a step has many of these
    return Output(request_id, 0, [], None, _STOP, None, num_cached, None, None, Pooled.of(result))


def pool_failure(request_id: str) -> Output:
    return _failure(
        request_id,
        "the pooled result of this request is not finite: weights or activations were NaN or infinite; "
        "others are not affected",
    )


def lost_query(request_id: str) -> Output:
    return _failure(
        request_id,
        "its query was aborted before it was computed, so this document cannot be scored; submit both again",
    )


def draw_failure(request: Request) -> Output:
    cause = "" if request.processors is None else request.processors.error
    if not cause:
        cause = (
            f"no token could be drawn for position {len(request.tokens)} of this request: the model gave values that "
            f"are not numbers, or the parameters forbid every token{_why(request)}"
        )
    error = f"{cause}; others are not affected"
    return _failure(request.id, error, sample=request.sample, num_cached=request.num_cached)


def refusal(request_id: str, error: Exception, sample: int = 0) -> Output:
    """The request is refused after its submission; its caller gets this error."""
    param = getattr(error, "param", None)
    return Output(request_id, sample, [], finish_reason=FinishReason.ERROR, error=str(error), param=param)


def _why(request: Request) -> str:
    """The possible causes of a row without an allowed token, for an error message."""
    error = "" if request.session is None else request.session.error
    return f" ({error})" if error else "" if request.processors is None else ", or its logits processors do"


def _failure(request_id: str, error: str, *, sample: int = 0, num_cached: int = 0) -> Output:
    return Output(
        request_id, sample, [], finish_reason=FinishReason.ERROR, num_cached_tokens=num_cached, error=error
    )  # fmt: skip


# InFlight: the plans that are launched and not committed, and the requests that their results belong to.
#
# A row may have another owner by the time its result arrives. So each launched plan keeps the requests that draw tokens
# in it, with their admission numbers, and the requests that are pooled in it. Results are assigned by these lists only.


@dataclass(frozen=True, slots=True)
class Launched:
    """One plan in flight. `requests` are those that draw tokens, in the plan's order."""

    step: int
    requests: list[Request]
    admissions: list[int]
    drawn: list[int] | None  # number of tokens that each request draws; None: one each
    scored: list[tuple[Request, int, int]]  # requests with scored prompt tokens, the first of them, how many
    chunks: list[tuple[Request, int, int]]  # requests that draw nothing, their admissions and lengths
    pooled: list[Request]  # requests whose pooled result is part of the result, in the plan's order
    sitting: list[Request] = field(default_factory=list)  # requests whose draws are dropped: see `SitOut`

    def without_sitting(self, result: StepResult) -> tuple[list[int] | None, StepResult]:
        """`drawn`, and a result in which the requests that sit out have accepted nothing."""
        if not self.sitting:
            return self.drawn, result
        counts = np.ones(len(self.requests), np.int32) if result.counts is None else result.counts.copy()
        failed = result.failed.copy()
        sitting = {id(request) for request in self.sitting}
        for index, request in enumerate(self.requests):
            if id(request) in sitting:
                counts[index], failed[index] = 0, False
            elif result.counts is None and failed[index]:
                counts[index] = 0
        return self.drawn or [1] * len(self.requests), replace(result, counts=counts, failed=failed)


class InFlight:
    def __init__(self) -> None:
        self._steps: deque[Launched] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(
        self,
        step: int,
        requests: list[Request],
        drawn: list[int] | None = None,
        scored: list[tuple[Request, int, int]] | None = None,
        chunks: list[tuple[Request, int, int]] | None = None,
        pooled: list[Request] | None = None,
    ) -> None:
        """`requests` draw tokens in this step, and have counted them as pending."""
        admissions = [request.admission for request in requests]
        self._steps.append(Launched(step, requests, admissions, drawn, scored or [], chunks or [], pooled or []))

    def oldest(self) -> Launched:
        """Remove and return the plan whose result arrives next."""
        assert self._steps, "a result came back while no plan is in flight"
        return self._steps.popleft()

    def sit_out(self, step: int, requests: Sequence[Request]) -> None:
        """These requests draw nothing in this step, which is launched."""
        next(launched for launched in self._steps if launched.step == step).sitting.extend(requests)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that each request's `pending` equals the number of its tokens in flight."""
        owed: Counter[int] = Counter()
        for launched in self._steps:
            drawn = launched.drawn or [1] * len(launched.requests)
            for request, admission, num in zip(launched.requests, launched.admissions, drawn, strict=True):
                owed[id(request)] += num
                assert request.status is not Status.RUNNING or request.admission == admission, (
                    f"{request} was admitted again while a token of admission {admission} is in flight"
                )
        leaving = {id(request) for launched in self._steps for request in launched.pooled}
        for request in requests:
            assert (request.status is not Status.DRAINING) or id(request) in leaving, f"{request}: its result is lost"
            assert request.pending == owed[id(request)], f"{request}: {owed[id(request)]} tokens are in flight"


# Stop rules on token ids. The front end checks stop strings and aborts the request.

Ending = tuple[int, FinishReason | None, int | None]
"""How many of the new tokens are output, why the request ended (None: it goes on), the stop token that ended it."""


def check_stop(request: Request, num_new: int) -> Ending:
    """Whether one of the `num_new` tokens just appended is the last of the request.

    A stop token goes before the length: it ends the text even where the length would have, too. Each new token is
    given here once, which repetition detection counts on.
    """
    repetition = request.repetition
    tokens, first = request.tokens, len(request.tokens) - num_new
    for index in range(first, len(tokens)):
        token, length = tokens[index], index + 1
        if token in request.stop_ids and length - request.num_prompt >= request.params.min_tokens:
            return length - first, FinishReason.STOP, token
        if length >= request.max_length:
            return length - first, FinishReason.LENGTH, None
        is_repeated = repetition is not None and repetition.ends_with(token)
        if is_repeated and length - request.num_prompt >= request.params.min_tokens:
            return length - first, FinishReason.REPETITION, None
    return num_new, None, None
