"""What a caller gets back: the shapes people already use."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None  # 1 is the likeliest; None for a token of logprob_token_ids that is not among them
    decoded_token: str | None = None


class RequestMetrics(msgspec.Struct):
    arrival_time: float  # seconds since the epoch
    first_token_ts: float = 0.0  # monotonic seconds
    last_token_ts: float = 0.0  # monotonic seconds
    first_token_latency: float = 0.0  # seconds from arrival to the first token


class CompletionOutput(msgspec.Struct):
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    # a token: the chosen one first, then the likeliest, then those of logprob_token_ids
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for the end token

    def finished(self) -> bool:
        return self.finish_reason is not None


class Increment(msgspec.Struct):
    """What is new of one sample since its last increment; all of them together are its whole output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None  # given with the last one
    stop_reason: int | str | None


class RequestOutput(msgspec.Struct):
    """All samples of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None  # a prompt token; None for the first
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
