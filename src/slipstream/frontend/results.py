"""Result classes of generation, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None  # 1 is the most likely; None for a token of logprob_token_ids without a rank
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
    # one dict per token: the sampled token first, then the most likely ones, then those of logprob_token_ids
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the stop token or stop string found; None for an end-of-text token

    def finished(self) -> bool:
        return self.finish_reason is not None


class Increment(msgspec.Struct):
    """What is new in one sample since its last increment. The increments together are its whole output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None  # set in the last increment
    stop_reason: int | str | None


class RequestOutput(msgspec.Struct):
    """All samples of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None  # by prompt token; None for the first
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
