"""Copies of a token (Gemma 3n's AltUp): all of them from each other, and corrected by the one that was computed."""

from slipstream.ops.gemm.altup import reference
from slipstream.ops.platform.dispatch import by_device

predict_copies = by_device(reference.predict_copies, "slipstream.ops.gemm.altup.triton")
route_copies = by_device(reference.route_copies, "slipstream.ops.gemm.altup.triton")
correct_copies = by_device(reference.correct_copies, "slipstream.ops.gemm.altup.triton")

__all__ = ["correct_copies", "predict_copies", "route_copies"]
