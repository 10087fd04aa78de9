"""The rows of a step for recurrent ops: their state slots, chunks, drafts, and the states to save."""

from slipstream.ops.platform.dispatch import by_device
from slipstream.ops.recurrent.steps import reference
from slipstream.ops.recurrent.steps.reference import (
    Bases,
    DraftSteps,
    RecurrentSteps,
    RowPositions,
    max_chunks,
    seen_tokens,
)

_KERNELS = "slipstream.ops.recurrent.steps.triton"
list_chunks = by_device(reference.list_chunks, _KERNELS)
advance_bases_ = by_device(reference.advance_bases_, _KERNELS)
advance_seen_ = by_device(reference.advance_seen_, _KERNELS)

__all__ = [
    "Bases",
    "DraftSteps",
    "RecurrentSteps",
    "RowPositions",
    "advance_bases_",
    "advance_seen_",
    "list_chunks",
    "max_chunks",
    "seen_tokens",
]
