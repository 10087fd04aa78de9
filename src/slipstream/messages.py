"""The wire between a front end and a core: plain data, the same in one process or across two.

Messages are trees, so those that come by the thousand are kept out of the collector's sight.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from slipstream.params import SamplingParams
from slipstream.pooling_params import PoolingParams
from slipstream.request import FinishReason


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A prompt enters."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    arrival_time: float
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # prompts share cached pages only within one salt
    bad_words: list[list[int]] = []  # the parameters' bad words in tokens
    type_start: int | None = None  # of a pair: where its second text begins; token types are 0 before and 1 from there
    num_seen: int | None = None  # its first so many tokens are seen by all of them, the others by none; None: all are
    model: str = ""  # its name, where one engine has several; empty means the first
    caller: str = ""  # requests of one priority are served by fair turns of their callers; offline there is one caller

    @property
    def submits(self) -> list[Submit]:
        return [self]

    @property
    def num_samples(self) -> int:
        return self.params.n if isinstance(self.params, SamplingParams) else 1


class SubmitAll(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Prompts of one call enter, all of them or none."""

    submits: Annotated[list[Submit], msgspec.Meta(min_length=1)]


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a request, or one of its samples. Unknown ones are ignored: they may just have finished."""

    request_id: str
    sample: int | None = None


LOGPROB = np.dtype([("logprob", "<f8"), ("token", "<i4"), ("rank", "<i4")])
"""A logprob on its way. A token of a text or a prompt has several of them, each of its request equally many: its own,
those of the likeliest tokens in their order, those of logprob_token_ids. Rank 1 is the likeliest, 0 was not counted."""


_NAMES = {np.dtype(real): real.__name__ for real in (np.float16, np.float32, np.float64)}  # asking costs 3 us each


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Numbers that leave the engine: a vector, or a matrix with a line for each token."""

    shape: tuple[int, ...]
    dtype: str  # numpy's name
    data: memoryview  # their bytes

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> Pooled:
        return cls(array.shape, _NAMES[array.dtype], array.data)

    def array(self) -> np.ndarray[Any, Any]:
        """Read only where it came from another process; the very array where it did not."""
        whole = self.data.obj
        if isinstance(whole, np.ndarray):
            return whole
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Output(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """What one step gave one sample of one request."""

    request_id: str
    sample: int
    token_ids: list[int]
    logprobs: bytes | None = None  # LOGPROBs of each of these tokens, one token after another
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, if one did
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: bytes | None = None  # of the next prompt tokens, from the second on; comes by chunks
    pooled: Pooled | None = None  # the whole result of a pooling request, which ends with it
