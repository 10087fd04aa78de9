"""Result classes of generation, with vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None  # 1 is the most likely; None for a token of logprob_token_ids without a rank
    decoded_token: str | None = None


class RequestMetrics(msgspec.Struct):
    """Names of vLLM's RequestStateStats."""

    arrival_time: float  # seconds since the epoch
    queued_ts: float = 0.0  # monotonic seconds
    scheduled_ts: float = 0.0  # monotonic seconds; 0 where it is not known, as for `LLM`
    num_generation_tokens: int = 0
    first_token_ts: float = 0.0  # monotonic seconds
    last_token_ts: float = 0.0  # monotonic seconds
    first_token_latency: float = 0.0  # seconds from arrival to the first token


Struct = TypeVar("Struct", bound=type[msgspec.Struct])


def as_dataclass(*names: str) -> Callable[[Struct], Struct]:
    """Lets `dataclasses.asdict`, `fields` and `replace` work on a Struct, with these attributes as its fields."""

    def change(kind: Struct) -> Struct:
        made: Any = dataclasses.make_dataclass(kind.__name__, [(name, Any) for name in names])
        kind.__dataclass_fields__ = made.__dataclass_fields__  # type: ignore[attr-defined]
        return kind

    return change


@as_dataclass("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason")
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

    # fields of vLLM for what this engine does not have
    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class Increment(msgspec.Struct):
    """The new part of one sample since its last increment. The increments together are its whole output."""

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

    # fields of vLLM for what this engine does not have
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
