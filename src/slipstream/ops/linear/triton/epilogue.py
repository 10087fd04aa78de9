"""What kernels of products share: the norm before, the gated activation after, counters for those that split; and where
those for Hopper serve."""

from __future__ import annotations

import threading
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

GATES = {"": 0, "silu": 1, "gelu_tanh": 2}
SMALL = 8 << 20  # numbers in a weight


class Norm(NamedTuple):
    """The RMS norm of x + residual, taken before the product."""

    weight: torch.Tensor  # [in]
    eps: float
    residual: torch.Tensor | None  # [rows, in]
    total: torch.Tensor | None  # [rows, in], where the sum is left if there is a residual


def streams_well(x: torch.Tensor, weight: torch.Tensor, *, chained: bool = False) -> bool:
    """Where the kernel for Hopper serves and beats the library, by benchmarks/ops/linear.py. With more than 32 rows it
    reads x as often as the weight; a short product of very many outputs leaves it too little to do at a time. Chained,
    it also saves what lies between products, by benchmarks/ops/layer.py."""
    if not can_stream(x, weight):
        return False
    if len(x) > (64 if chained else 32):
        return weight.numel() <= SMALL
    return len(weight) < 65536 or weight.shape[1] >= 2048


def can_stream(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tensor copies want rows that begin at multiples of 16 bytes."""
    aligned = (x.stride(0) | weight.stride(0)) % 8 == 0 and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return aligned and x.stride(1) == weight.stride(1) == 1 and _hopper_serves(x.device)


@cache
def _hopper_serves(device: torch.device) -> bool:
    """The language is young: only the version it was tested with will do."""
    if device.type != "cuda" or not triton.__version__.startswith("3.6."):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


_counters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_zeros: dict[torch.device, torch.Tensor] = {}  # that no weight has yet
_lock = threading.Lock()  # engines may start side by side
_CHUNK = 1 << 20  # numbers taken at a time, more than twice what a model of 70 billion weights has
_LINE = 32  # numbers that a multiprocessor reads at once: no two weights share them


def counters(weight: torch.Tensor) -> torch.Tensor:
    """How many of the programs that share a block of outputs are done; 0 between kernels. They are the weight's own, so
    that two engines never count together, and of memory that is there already, so that a graph being captured need not
    set them to 0 at each replay."""
    with _lock:
        return _find_counters(weight)


def _find_counters(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor | None = _counters.get(weight)
    if found is None:
        # one more, since few outputs may be shared by two blocks of rows
        num = triton.cdiv(len(weight), 16) + 1
        found = _take(num, weight.device)
        if found is None:  # none is left, and a graph is being captured: they are the graph's
            return torch.zeros(num, dtype=torch.int32, device=weight.device)
        _counters[weight] = found
    return found


def _take(num: int, device: torch.device) -> torch.Tensor | None:
    left, num_lines = _zeros.get(device), triton.cdiv(num, _LINE) * _LINE
    if left is None or len(left) < num_lines:
        if _is_capturing(device):
            return None
        left = torch.zeros(max(_CHUNK, num_lines), dtype=torch.int32, device=device)
    _zeros[device] = left[num_lines:]
    return left[:num]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@triton.jit
def weight_rows(block, num_out, GATE: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """The rows of the weight that a block reads. Gates and ups take turns, so that a pair meets in one program."""
    lane = tl.arange(0, BLOCK_OUT)
    if GATE:
        own = block * (BLOCK_OUT // 2) + lane // 2
        return own + lane % 2 * num_out, own < num_out
    else:
        own = block * BLOCK_OUT + lane
        return own, own < num_out


@triton.jit
def finish(
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
    """Bias, activation, and the store."""
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
        place = out + row[:, None] * num_out + own[None, :]
        tl.store(place, (gate * tl.sigmoid(slope) * up).to(out.dtype.element_ty), mask=mask)
    else:
        own = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        mask = there[:, None] & (own < num_out)[None, :]
        tl.store(out + row[:, None] * num_out + own[None, :], result.to(out.dtype.element_ty), mask=mask)
