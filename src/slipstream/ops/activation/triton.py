"""Gated activations on CUDA: in float32, rounded once. The input's last dimension is [gate, up]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up, gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu by its tanh approximation."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    merged = gate_up.reshape(-1, 2 * size)
    if merged.stride(1) != 1:
        merged = merged.contiguous()
    if len(merged):
        grid = (triton.cdiv(size, _BLOCK), len(merged))
        _gate_kernel[grid](merged, out, merged.stride(0), size, GELU=gelu, BLOCK=_BLOCK, num_warps=4)
    return out


# grid: (blocks, rows)
@triton.jit
def _gate_kernel(gate_up, out, stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    gate = tl.load(gate_up + row * stride + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + place, mask=mask, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * size + place, (gate * tl.sigmoid(slope) * up).to(out.dtype.element_ty), mask=mask)
