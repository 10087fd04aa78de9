"""Builds the inputs of a step from row tables: token ids, positions, lengths, cache slots and page tables."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.step_inputs import native
from slipstream.ops.step_inputs.reference import MAX_ADVANCED_DRAFTS, KeptTokens, StepInputs, StepRows

gather_inputs = by_device(native.gather_inputs, "slipstream.ops.step_inputs.triton")

__all__ = ["MAX_ADVANCED_DRAFTS", "KeptTokens", "StepInputs", "StepRows", "gather_inputs"]
