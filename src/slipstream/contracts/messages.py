"""Messages between a front end and a core: plain data, the same within one process and across two.

Messages contain no cycles, so frequent ones are excluded from garbage collection (gc=False).
"""

from __future__ import annotations

from typing import Annotated, Any, Protocol, Self

import msgspec
import numpy as np

from slipstream.contracts.images import PromptImages
from slipstream.contracts.request import FinishReason
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.params.thinking import Thinking

_NAMES = {np.dtype(real): real.__name__ for real in (np.float16, np.float32, np.float64)}  # dtype.name takes 3 us


class ArrayMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A numpy array of floating-point values."""

    shape: tuple[int, ...]
    dtype: str  # numpy's name
    data: memoryview  # bytes of the array

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> Self:
        return cls(array.shape, _NAMES[array.dtype], array.data)

    def array(self) -> np.ndarray[Any, Any]:
        """Read-only if it came from another process; else the original array."""
        whole = self.data.obj
        if isinstance(whole, np.ndarray):
            return whole
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Pooled(ArrayMessage, frozen=True, array_like=True, gc=False):
    """The result of a pooling request: a vector, or a matrix with one row per token."""


class PromptEmbeds(ArrayMessage, frozen=True, array_like=True, gc=False):
    """Token embeddings of a prompt, [tokens, hidden size]: float64 for a model in float64, else float32."""


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A new request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    arrival_time: float
    priority: int = 0  # lower values run first
    cache_salt: str = ""  # prompts share cached pages only within one salt
    bad_words: list[list[int]] = []  # bad words of the parameters as token ids
    type_start: int | None = None  # of a text pair: index of the second text; token type is 0 before, 1 from there
    num_seen: int | None = None  # the first `num_seen` tokens are attended to, the others by none; None: all
    model: str = ""  # model name if the engine has several; empty: the first
    caller: str = ""  # fair queueing between callers within one priority; offline there is one caller
    thinking: Thinking | None = None  # markers of reasoning, with a thinking budget
    lora: LoRARequest | None = None  # the request's adapter
    # Replace the embeddings of `prompt_token_ids`, which are zeros then; the hash of their values is in `cache_salt`.
    prompt_embeds: PromptEmbeds | None = None
    images: PromptImages | None = None  # of the prompt, in which each has its tokens

    @property
    def submits(self) -> list[Submit]:
        return [self]

    @property
    def num_samples(self) -> int:
        return self.params.n if isinstance(self.params, SamplingParams) else 1


class SubmitAll(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The requests of one call: all are accepted or none."""

    submits: Annotated[list[Submit], msgspec.Meta(min_length=1)]


class PromptSource(Protocol):
    """The prompts of one call, for a core in the same thread: the core takes them when its steps have room. Taking them
    runs code of the front end, such as a tokenizer, which neither raises nor changes the core."""

    has_one_priority: bool

    def is_ready(self) -> bool:
        """Whether `take` does not wait."""

    def take(self, limit: int) -> list[Submit]:
        """The next prompts, up to the limit: one, which may be waited for, and more if they are ready. Empty: all were
        taken."""

    def fail(self, error: BaseException) -> None:
        """The core has refused a prompt, and takes no more."""


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Cancels a request, or one of its samples. Unknown ids are ignored: the request may have finished."""

    request_id: str
    sample: int | None = None


LOGPROB = np.dtype([("logprob", "<f8"), ("token", "<i4"), ("rank", "<i4")])
"""Wire format of a logprob. Every token of a request has the same number of entries: its own logprob, the most likely
tokens in order, then logprob_token_ids. Rank 1 is the most likely token; rank 0: not computed."""


class Output(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The output of one step for one sample of a request."""

    request_id: str
    sample: int
    token_ids: list[int]
    logprobs: bytes | None = None  # LOGPROB entries, token by token
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the token that ended the sample, if any
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: bytes | None = None  # of the next prompt tokens, from the second on; one part per chunk
    pooled: Pooled | None = None  # the complete result of a pooling request, in its last output
    param: str | None = None  # with an error: the request was refused, because this parameter is wrong
