"""Shared by the Triton GEMM kernels: norm before, epilogue (bias, gated activation, store), split-k counters."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

GATES = {"": 0, "silu": 1, "gelu_tanh": 2}


class Norm(NamedTuple):
    """The RMS norm of x + residual, computed before the GEMM."""

    weight: torch.Tensor  # [in]
    eps: float
    residual: torch.Tensor | None  # [rows, in]
    total: torch.Tensor | None  # [rows, in] receives x + residual; None without a residual
    normed: torch.Tensor | None = None  # [rows, in] receives the norm, if given: of inputs that one load has


_counters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_zeros: dict[torch.device, torch.Tensor] = {}  # not yet assigned to a weight
_lock = threading.Lock()  # engines may start in several threads
_CHUNK = 1 << 20  # counters per allocation; a 70B model needs less than half
_PER_CACHE_LINE = 32  # counters per cache line of 128 bytes: two weights share no line


def counters(weight: torch.Tensor) -> torch.Tensor:
    """Split-k counters of a weight: per block of outputs, how many programs have stored their partial sums; 0 between
    kernels. Each weight has its own counters, so that two engines never share one. They are allocated outside of graph
    capture where possible, so that a replay need not clear them."""
    with _lock:
        return _find_counters(weight)


def split_memory(
    weight: torch.Tensor, splits: int, num_blocks: int, size: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Memory for the partial sums of a split GEMM, `size` per block and split, and its counters."""
    if splits == 1:
        return None, None
    arrived = counters(weight)
    assert num_blocks <= len(arrived), f"{num_blocks} blocks, but {len(arrived)} counters"
    return torch.empty((splits, num_blocks, size), dtype=torch.float32, device=weight.device), arrived


def reserve_counters(device: torch.device) -> None:
    """Allocates counters for weights to come. A start does this before it allocates anything that it frees again:
    between freed blocks, the counters would leave no room for the largest one."""
    with _lock:
        if device not in _zeros:
            _zeros[device] = torch.zeros(_CHUNK, dtype=torch.int32, device=device)


def _find_counters(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor | None = _counters.get(weight)
    if found is None:
        # one extra: a weight with few outputs may be covered by two blocks of rows
        num = triton.cdiv(len(weight), 16) + 1
        found = _take(num, weight.device)
        if found is None:  # none left during a capture: these belong to the graph, which clears them
            return torch.zeros(num, dtype=torch.int32, device=weight.device)
        _counters[weight] = found
    return found


def _take(num: int, device: torch.device) -> torch.Tensor | None:
    left, num_counters = _zeros.get(device), triton.cdiv(num, _PER_CACHE_LINE) * _PER_CACHE_LINE
    if left is None or len(left) < num_counters:
        if _is_capturing(device):
            return None
        left = torch.zeros(max(_CHUNK, num_counters), dtype=torch.int32, device=device)
    _zeros[device] = left[num_counters:]
    return left[:num]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@triton.jit
def weight_rows(block, num_out, GATE: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """The weight rows of a block and their mask. Gate and up rows alternate, so that one program has both of a pair."""
    lane = tl.arange(0, BLOCK_OUT)
    if GATE:
        own = block * (BLOCK_OUT // 2) + lane // 2
        return own + lane % 2 * num_out, own < num_out
    else:
        own = block * BLOCK_OUT + lane
        return own, own < num_out


@triton.jit
def store_epilogue(
    result,  # [ROWS, BLOCK_OUT] float32
    row,
    there,
    bias,
    out,
    block,
    num_out,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """The epilogue: adds the bias, applies the gated activation, stores."""
    if bias is not None:
        source, inside = weight_rows(block, num_out, GATE, BLOCK_OUT)
        result += tl.load(bias + source, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATE:
        gate, up = tl.split(tl.reshape(result, (ROWS, BLOCK_OUT // 2, 2)))
        slope = gate
        if GATE == 2:
            # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        own = block * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
        mask = there[:, None] & (own < num_out)[None, :]
        target = out + row[:, None] * num_out + own[None, :]
        tl.store(target, (gate * tl.sigmoid(slope) * up).to(out.dtype.element_ty), mask=mask)
    else:
        own = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        mask = there[:, None] & (own < num_out)[None, :]
        tl.store(out + row[:, None] * num_out + own[None, :], result.to(out.dtype.element_ty), mask=mask)
