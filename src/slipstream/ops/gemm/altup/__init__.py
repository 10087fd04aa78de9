"""Streams of a token (Gemma 3n's AltUp): all of them from each other, and corrected by the one that was computed."""

from slipstream.ops.gemm.altup import reference
from slipstream.ops.platform.dispatch import by_device

predict_streams = by_device(reference.predict_streams, "slipstream.ops.gemm.altup.triton")
route_streams = by_device(reference.route_streams, "slipstream.ops.gemm.altup.triton")
correct_streams = by_device(reference.correct_streams, "slipstream.ops.gemm.altup.triton")

__all__ = ["correct_streams", "predict_streams", "route_streams"]
