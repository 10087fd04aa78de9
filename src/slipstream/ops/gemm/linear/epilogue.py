"""Shared by the Triton GEMM kernels: norm before, epilogue (bias, gated activation, store), split-k counters."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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


# Epilogue of the Gluon kernels that stream weights: norm before, bias, gated activation or residual, norm after.
#
# Sums have a layout in which adjacent lanes hold adjacent outputs (`target_of`). The operands of the epilogue are
# results of earlier kernels; a kernel loads them before its sums are complete.


@gluon.jit
def target_of(given, first_row, block, GATE: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr):
    """Rows and outputs of a part of a block, offsets of its results, and their mask."""
    num_rows, num_out = given[6], given[7]
    OWN: gl.constexpr = OUTPUTS // 2 if GATE else OUTPUTS
    SIZE: gl.constexpr = triton.next_power_of_2(OWN)
    # adjacent lanes hold adjacent outputs, as out is laid out
    BY_ROW: gl.constexpr = gl.BlockedLayout([2 if SIZE >= 64 else 1, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, BY_ROW))
    lane = gl.arange(0, SIZE, gl.SliceLayout(1, BY_ROW))
    own = block * OWN + lane
    inside = own < num_out
    if OWN < SIZE:
        inside = inside & (lane < OWN)
    mask = gl.expand_dims(inside, 1) & gl.expand_dims(row < num_rows, 0)
    return row, own, gl.expand_dims(row * num_out, 0) + gl.expand_dims(own, 1), mask


@gluon.jit
def load_operands(
    given,
    first_row,
    block,
    PARTS: gl.constexpr,
    GATE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    PLAIN: gl.constexpr = False,  # the scale of x is a number
):
    """Loads what the epilogue needs of earlier kernels: partial sums of squares, the residual (gated: for the gate
    rows, then the up rows), and the scales of FP8 rows; the scales of the weight rows (of the up rows too); and the
    weights of the next norm, which would delay the results if they were loaded when these are stored."""
    squares, residual, num_rows, num_out, scale, x_scale = given[0], given[4], given[6], given[7], given[8], given[9]
    norm = given[5]
    row, own, target, mask = target_of(given, first_row, block, GATE, OUTPUTS, ROWS)
    parts = row  # unused without squares
    added, added_up = row, row  # unused without a residual
    of_x, of_weight, of_up = row, row, row  # unused without scales
    factor = row  # unused without a norm
    if norm is not None:
        factor = gl.load(norm + own, mask=own < num_out, other=0.0)
    if squares is not None:
        part = gl.expand_dims(gl.arange(0, triton.next_power_of_2(PARTS), gl.SliceLayout(1, mask.type.layout)), 1)
        padded_row = gl.expand_dims(row, 0)
        parts = gl.load(squares + padded_row * PARTS + part, mask=(part < PARTS) & (padded_row < num_rows), other=0.0)
    if residual is not None:
        if GATE:
            target += gl.expand_dims(row * num_out, 0)
            added_up = gl.load(residual + num_out + target, mask=mask, other=0.0)
        added = gl.load(residual + target, mask=mask, other=0.0)
    if scale is not None:
        of_weight = gl.load(scale + own, mask=own < num_out, other=0.0)
        if GATE:
            of_up = gl.load(scale + num_out + own, mask=own < num_out, other=0.0)
    if x_scale is not None:
        if PLAIN:
            BY_ROW: gl.constexpr = row.type.layout
            of_x = gl.zeros([ROWS], gl.float32, BY_ROW) + x_scale
        else:
            of_x = gl.load(x_scale + row, mask=row < num_rows, other=0.0)
    return parts, added, added_up, of_x, of_weight, of_up, factor


@gluon.jit
def store_results(
    result,
    up,
    operands,
    given,
    results,
    first_row,
    block,
    GATE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """The epilogue of the sums of ROWS rows of a block, in the layout of `target_of`. Gated: `result` has the sums of
    the gate rows, `up` those of the up rows."""
    squares, eps, num_in, bias, residual, norm, num_rows, num_out, scale, x_scale = given
    out, weighted, made, partials, arrived = results
    parts, added, added_up, of_x, of_weight, of_up, factor = operands
    row, own, target, mask = target_of(given, first_row, block, GATE, OUTPUTS, ROWS)
    inside = own < num_out
    if scale is not None:
        result *= gl.expand_dims(of_weight, 1)
        if GATE:
            up *= gl.expand_dims(of_up, 1)
    if x_scale is not None:
        result *= gl.expand_dims(of_x, 0)
        if GATE:
            up *= gl.expand_dims(of_x, 0)
    if squares is not None:
        divided = gl.expand_dims(gl.rsqrt(gl.sum(parts, 0) / num_in + eps), 0)
        result *= divided
    if bias is not None:
        result += gl.expand_dims(gl.load(bias + own, mask=inside, other=0.0).to(gl.float32), 1)
    if residual is not None:
        result += added.to(gl.float32)
    if GATE:
        if squares is not None:
            up *= divided
        if bias is not None:
            up += gl.expand_dims(gl.load(bias + num_out + own, mask=inside, other=0.0).to(gl.float32), 1)
        if residual is not None:
            up += added_up.to(gl.float32)
        slope = result
        if GATE == 2:
            # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
            slope = 1.5957691216057308 * (result + 0.044715 * result * result * result)
        result = result / (1.0 + gl.exp(-slope)) * up
    rounded = result.to(out.dtype.element_ty)
    gl.store(out + target, rounded, mask=mask)
    if norm is not None:
        value = rounded.to(gl.float32)
        weights = gl.expand_dims(factor.to(gl.float32), 1)
        gl.store(weighted + target, (value * weights).to(out.dtype.element_ty), mask=mask)
        total = gl.sum(value * value, 0)
        gl.store(made + row * (gl.num_programs(1) * GROUPS) + block, total, mask=row < num_rows)
