"""The rows of a step for recurrent ops: their state slots, chunks, drafts, and the states to save."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.recurrent_steps import reference
from slipstream.ops.recurrent_steps.reference import Bases, RowPositions, seen_tokens
from slipstream.ops.recurrent_steps.steps import DraftSteps, RecurrentSteps, max_chunks

_KERNELS = "slipstream.ops.recurrent_steps.triton"
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
