"""The wire between a front end and a core: plain data, the same in one process or across two."""

from __future__ import annotations

import msgspec

from slipstream.params import SamplingParams
from slipstream.request import FinishReason


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A prompt enters."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # prompts share cached pages only within one salt
    bad_words: list[list[int]] = []  # the parameters' bad words in tokens


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget a request, or one of its samples. Unknown ones are ignored: they may just have finished."""

    request_id: str
    sample: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token's logprob and rank, the likeliest tokens, and those of logprob_token_ids in their order."""

    chosen: float
    rank: int
    top_ids: list[int]
    top: list[float]
    given: list[float] = []


class Output(msgspec.Struct, frozen=True, tag=True):
    """What one step gave one sample of one request."""

    request_id: str
    sample: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, if one did
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the next prompt tokens, from the second on; comes by chunks
