"""Layer norm, optionally fused with the residual add before it."""

from slipstream.ops.dispatch import by_device
from slipstream.ops.layer_norm import reference

layer_norm = by_device(reference.layer_norm, "slipstream.ops.layer_norm.triton")
layer_norm_of_sum = by_device(reference.layer_norm_of_sum, "slipstream.ops.layer_norm.triton")
add_layer_norm = by_device(reference.add_layer_norm, "slipstream.ops.layer_norm.triton")

__all__ = ["add_layer_norm", "layer_norm", "layer_norm_of_sum"]
