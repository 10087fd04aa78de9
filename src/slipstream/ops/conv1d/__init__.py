"""Causal depthwise convolution over packed rows; the last inputs of each row are carried between steps."""

from slipstream.ops.conv1d import reference
from slipstream.ops.dispatch import by_device

causal_conv1d = by_device(reference.causal_conv1d, "slipstream.ops.conv1d.triton")

__all__ = ["causal_conv1d"]
