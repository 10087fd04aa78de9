"""What recurrent ops need to know of a step's rows: their state slots, their chunks, and which states to save."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.recurrent_steps import reference
from slipstream.ops.recurrent_steps.steps import RecurrentSteps, max_chunks

list_chunks = by_device(reference.list_chunks, "slipstream.ops.recurrent_steps.triton")

__all__ = ["RecurrentSteps", "list_chunks", "max_chunks"]
