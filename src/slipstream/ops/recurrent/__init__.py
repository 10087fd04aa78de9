"""Causal depthwise convolution over packed rows; the last inputs of each row are carried between steps."""

from slipstream.ops.platform.dispatch import by_device
from slipstream.ops.recurrent import delta_rule, replay, ssm, steps
from slipstream.ops.recurrent.delta_rule import DeltaWeights
from slipstream.ops.recurrent.ssm import SelectiveWeights, SsdWeights
from slipstream.ops.recurrent.steps import (
    Bases,
    DraftSteps,
    RecurrentSteps,
    RowPositions,
    max_chunks,
    seen_tokens,
)

causal_conv1d = by_device(replay.causal_conv1d, "slipstream.ops.recurrent.conv1d_triton")

# Gated delta rule: linear attention whose state decays by a gate and is corrected by the error of each key's value.
#
# `gated_delta_rule` computes packed rows, in chunks where rows have several tokens. `delta_decode` is all that a layer
# does between its two projections, for steps of one token per row.

_KERNELS = "slipstream.ops.recurrent.delta_triton"
delta_gates = by_device(delta_rule.delta_gates, _KERNELS)
gated_delta_rule = by_device(delta_rule.gated_delta_rule, _KERNELS)
delta_decode = by_device(delta_rule.delta_decode, _KERNELS)
delta_replay_ = by_device(delta_rule.delta_replay_, _KERNELS)

# State space mixers: the scans of Mamba-2 (SSD) and Mamba-1.

_SSM_KERNELS = "slipstream.ops.recurrent.ssm_triton"
ssd_scan = by_device(ssm.ssd_scan, _SSM_KERNELS)
selective_scan = by_device(ssm.selective_scan, _SSM_KERNELS)


# The rows of a step for recurrent ops: their state slots, chunks, drafts, and the states to save.

_STEP_KERNELS = "slipstream.ops.recurrent.steps_triton"
list_chunks = by_device(steps.list_chunks, _STEP_KERNELS)
advance_bases_ = by_device(steps.advance_bases_, _STEP_KERNELS)
advance_seen_ = by_device(steps.advance_seen_, _STEP_KERNELS)


__all__ = [
    "Bases",
    "DeltaWeights",
    "DraftSteps",
    "RecurrentSteps",
    "RowPositions",
    "SelectiveWeights",
    "SsdWeights",
    "advance_bases_",
    "advance_seen_",
    "causal_conv1d",
    "delta_decode",
    "delta_gates",
    "delta_replay_",
    "gated_delta_rule",
    "list_chunks",
    "max_chunks",
    "seen_tokens",
    "selective_scan",
    "ssd_scan",
]
