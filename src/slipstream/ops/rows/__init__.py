"""From row tables to a step's inputs: tokens, positions, lengths, slots and pages of the rows it runs."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.rows import reference
from slipstream.ops.rows.reference import StepRows

gather_rows = by_device(reference.gather_rows, "slipstream.ops.rows.triton")

__all__ = ["StepRows", "gather_rows"]
