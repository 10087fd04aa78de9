"""Launches `layer_kernel.py`: the GEMMs from one attention to the next with FP8 weights, for a single row."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.linear.triton.epilogue import GATES
from slipstream.ops.pdl import dependent
from slipstream.ops.quantized.layer_gemms import PROGRAMS, SPLITS, LayerGemms
from slipstream.ops.quantized.triton import layer_kernel
from slipstream.ops.quantized.triton.layer_kernel import OUTPUTS, TILE

STAGES = 13  # of 16 KB


def launch_layer(
    x: torch.Tensor,  # [1, in]
    residual: torch.Tensor,  # [1, hidden]
    gemms: LayerGemms,
    gate: str,
    arrived: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the next qkv [1, out], or without one the normed hidden states [1, hidden]; and the sum with the
    residual before the norm [1, hidden]."""
    o, gate_up, down, next_qkv = gemms[:4]
    hidden, feed = len(o.values), len(gate_up.values) // 2
    num_out, next_units, next_weight = hidden, 0, down
    if next_qkv is not None:
        num_out, next_weight = len(next_qkv.values), next_qkv
        next_units = num_out // OUTPUTS.value
    memory = torch.empty(2 * SPLITS * hidden + feed // 2, dtype=torch.float32, device=x.device)
    o_parts, down_parts, gated = memory.split([SPLITS * hidden, SPLITS * hidden, feed // 2])
    total = torch.empty_like(residual)
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    layer_kernel.layer_kernel[(PROGRAMS,)](
        x,
        residual,
        _describe(o.values),
        _describe_pairs(gate_up.values),
        _describe(down.values),
        _describe(next_weight.values),
        o.scale,
        gate_up.scale,
        down.scale,
        next_weight.scale,
        gemms.feed_norm,
        gemms.next_norm,
        gemms.feed_eps,
        gemms.next_eps,
        o_parts,
        gated.view(torch.bfloat16),
        down_parts,
        total,
        out,
        arrived,
        next_units,
        O_IN=o.num_columns,
        HIDDEN=hidden,
        FEED=feed,
        O_SPLITS=SPLITS,
        DOWN_SPLITS=SPLITS,
        GATE=GATES[gate],
        STAGES=STAGES,
        num_warps=4,
        maxnreg=168,
        **dependent(x.device, 1),
    )
    return out, total


def _describe(values: torch.Tensor) -> Any:
    box = [OUTPUTS.value, TILE.value]
    return TensorDescriptor.from_tensor(values, box, gl.NVMMASharedLayout(128, 8, 2))


def _describe_pairs(values: torch.Tensor) -> Any:
    """[out / 8, gate and up, 8, in]"""
    rows, columns = values.shape
    shape, strides = [rows // 16, 2, 8, columns], [8 * columns, rows // 2 * columns, columns, 1]
    return TensorDescriptor(
        values, shape, strides, [OUTPUTS.value // 16, 2, 8, TILE.value], gl.NVMMASharedLayout(128, 8, 4)
    )
