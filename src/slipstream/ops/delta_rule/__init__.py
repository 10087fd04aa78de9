"""Gated delta rule: linear attention whose state decays by a gate and is corrected by the error of each key's value.

`gated_delta_rule` computes packed rows, in chunks where rows have several tokens. `delta_decode` is all that a layer
does between its two projections, for steps of one token per row.
"""

from slipstream.ops.delta_rule import reference
from slipstream.ops.delta_rule.reference import DeltaWeights
from slipstream.ops.dispatch import by_device

_KERNELS = "slipstream.ops.delta_rule.triton"
delta_gates = by_device(reference.delta_gates, _KERNELS)
gated_delta_rule = by_device(reference.gated_delta_rule, _KERNELS)
delta_decode = by_device(reference.delta_decode, _KERNELS)
delta_replay_ = by_device(reference.delta_replay_, _KERNELS)

__all__ = ["DeltaWeights", "delta_decode", "delta_gates", "delta_replay_", "gated_delta_rule"]
