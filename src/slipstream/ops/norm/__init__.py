"""RMS norm, optionally fused with the residual add before it."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.norm import native, reference

rms_norm = by_device(native.rms_norm, "slipstream.ops.norm.triton")
add_rms_norm = by_device(native.add_rms_norm, "slipstream.ops.norm.triton")
sum_rms_norm = by_device(reference.sum_rms_norm, "slipstream.ops.norm.triton")

__all__ = ["add_rms_norm", "rms_norm", "sum_rms_norm"]
