"""Result classes of generation, with vLLM's names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from slipstream.params.lora import LoRARequest

log = logging.getLogger("slipstream.front")


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


@dataclasses.dataclass(init=False, slots=True)
class RequestOutput:
    """All samples of one prompt. The arguments are vLLM's, in its order; those of a later version are ignored with a
    warning."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None  # by prompt token; None for the first
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None
    num_cached_tokens: int

    lora_request: LoRARequest | None

    # of vLLM; None but where a script sets them
    encoder_prompt: str | None
    encoder_prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestMetrics | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int = 0,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        **later: Any,
    ) -> None:
        if later:
            log.warning("RequestOutput has no %s; they are ignored", ", ".join(later))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.num_cached_tokens = num_cached_tokens
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.kv_transfer_params = kv_transfer_params
