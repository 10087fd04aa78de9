"""Logits processors: Python code of the user that edits the logits of requests before a token is drawn.

The interface is vLLM's. `LLM(logits_processors=[...])` takes classes; `SamplingParams(logits_processors=[...])` takes
callables. A processor always gets the true tokens of its request, at any depth: docs/logits-processors.md.

This file does not import torch: `logits` is a torch tensor on the model's device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from slipstream.params.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

    from slipstream.config.config import EngineConfig

State = TypeVar("State")
Needs = Literal["tokens", "logits"]

TokenEdit = Mapping[int, float] | Iterable[int] | None
"""What a processor that sees tokens returns: biases to add to some logits, the allowed token ids, or None."""

RequestLogitsProcessor = Callable[..., Any]
"""Of one request. It sees logits: (output_ids, logits) or (prompt_ids, output_ids, logits) to a tensor like `logits`,
one row; or tokens: (output_ids) or (prompt_ids, output_ids) to a TokenEdit. An attribute `needs` says which, default
"logits". The lists grow from call to call; they are not copied."""


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()  # the request at the first index moves to the second
    SWAP = enum.auto()  # never used here


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Changes of a processor's batch since the last step, to be processed in the order removed, added, moved."""

    batch_size: int
    removed: Sequence[int]  # indices
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]  # index, parameters, prompt, output tokens
    moved: Sequence[tuple[int, int, MoveDirectionality]]  # from, to


def process_dict_updates(
    entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Applies the changes of a batch to a processor's state by index, for `update_state`. `new_state` returns the state
    of an added request from its parameters, prompt and output tokens; None: it has none. Returns whether `entries`
    changed."""
    if batch_update is None:
        return False
    before = dict(entries)
    for index in batch_update.removed:
        entries.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        _put(entries, index, new_state(params, prompt, output))
    for start, end, direction in batch_update.moved:
        moved, replaced = entries.pop(start, None), entries.pop(end, None)
        _put(entries, end, moved)
        if direction is MoveDirectionality.SWAP:
            _put(entries, start, replaced)
    return entries != before


def _put(entries: dict[int, State], index: int, state: State | None) -> None:
    if state is None:
        entries.pop(index, None)
    else:
        entries[index] = state


class LogitsProcessor:
    """A processor of all requests of an engine: one object, which keeps state by the index of a request in the batch.

    The batch has the running requests that the processor is for, from index 0 on. Rows of requests that draw no token
    in a step are 0 in `logits`, and what `apply` returns for them is not used.
    """

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        """`config`: of the engine; `device`: of the model; `is_pin_memory`: whether host memory can be pinned."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for a request that must be refused."""

    def is_needed_by(self, sampling_params: SamplingParams) -> bool:
        """Whether the processor is for this request. Other requests are never part of its batch."""
        return True

    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest. If so, it runs after the temperature and not for greedy
        requests; else before penalties and temperature."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called once per step before `apply`. None: the batch is as before."""
        raise NotImplementedError

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`: [batch_size, vocabulary], a copy, which may be edited. Returns a tensor like it."""
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """Gives each request a callable of its own, or none. With `needs = "tokens"` the callables see tokens only."""

    needs: ClassVar[Needs] = "logits"

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable of a new request, one for each of its samples; None: the request has none."""
        raise NotImplementedError
