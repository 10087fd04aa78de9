"""EncoderRequest: a prompt that a model computes in one step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from slipstream.contracts.request import Adapter, WaitFor
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams


class EncoderRequest:
    __slots__ = (
        "id", "tokens", "num_tokens", "params", "type_start", "num_seen", "caller", "is_launched", "is_done", "lora",
        "adapter", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        tokens: Sequence[int],
        params: PoolingParams,
        type_start: int | None = None,
        num_seen: int | None = None,
        caller: str = "",
        lora: LoRARequest | None = None,
    ) -> None:
        self.id = id
        self.tokens = tokens if type(tokens) is array else array("i", tokens)
        self.num_tokens = len(tokens)
        self.params = params
        self.type_start = type_start  # first position of token type 1; None: all types are 0
        self.num_seen = num_seen  # leading tokens that all tokens attend to; None: all
        self.caller = caller  # callers of one priority are served by fair queueing
        self.lora = lora  # the adapter of the request
        self.adapter: Adapter | None = None  # set by `Adapters`
        self.waits_for = WaitFor.NOTHING
        self.is_launched = False
        self.is_done = False  # ended or aborted: skipped in queues and in results

    def __repr__(self) -> str:
        return f"EncoderRequest({self.id} of {self.num_tokens} tokens{', done' if self.is_done else ''})"
