"""LoRA on CUDA: a kernel that multiplies with A (shrink) and one that multiplies with B and adds (expand).

A program handles a tile of tokens that use the same adapter, so an adapter is read once per tile. In steps of few
tokens several programs share the inputs of A; the last of them to finish adds their sums in a fixed order.

The tiles, and B, are older than the step and are read before a kernel waits for the previous one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.config.memory import ADAPTED_INPUTS
from slipstream.ops.gemm.chains import StreamingRows, Unnormalized
from slipstream.ops.gemm.lora.reference import BLOCK, FEW_TOKENS, MAX_COLUMNS, LoraTiles, LoraWeights
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous

_INPUTS = 128  # inputs of one product
_FIRST_NUMBERS = 8192  # of A that a program loads before x is there


def shrink_lora(inputs: torch.Tensor | Unnormalized, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """As the reference."""
    x, squares, eps = StreamingRows.of(inputs)
    num_tokens, num_inputs = x.shape
    num_columns = weights.a.shape[1]
    inner = torch.empty(num_tokens, num_columns, dtype=weights.b.dtype, device=x.device)
    if not num_tokens:
        return inner
    columns = min(triton.next_power_of_2(num_columns), MAX_COLUMNS)
    is_split = num_tokens <= FEW_TOKENS
    splits = triton.cdiv(num_inputs, ADAPTED_INPUTS) if is_split else 1
    sums = None
    if splits > 1:
        assert weights.arrived is not None
        sums = torch.empty(splits, num_tokens, num_columns, dtype=torch.float32, device=x.device)
    assert x.stride(1) == 1 and weights.a.stride(2) == 1
    _shrink_kernel[(len(tiles.tiles), triton.cdiv(num_columns, columns), splits)](
        x,
        weights.a,
        squares,
        inner,
        sums,
        weights.arrived,
        tiles.order,
        tiles.tiles,
        eps,
        num_tokens,
        num_inputs,
        num_columns,
        x.stride(0),
        weights.a.stride(0),
        weights.a.stride(1),
        PARTS=0 if squares is None else squares.shape[1],
        SPLITS=splits,
        TOKENS=tiles.size,
        COLUMNS=columns,
        INPUTS=min(ADAPTED_INPUTS, _FIRST_NUMBERS // columns) if is_split else _INPUTS,
        PART=ADAPTED_INPUTS if is_split else 0,
        num_warps=4,
        **dependent(x.device, num_tokens),
    )
    return inner


def add_lora_embedding(
    out: torch.Tensor, ids: torch.Tensor, weights: LoraWeights, tiles: LoraTiles, scale: float
) -> torch.Tensor:
    """As the reference."""
    num_tokens = len(ids)
    if not num_tokens:
        return out
    assert weights.a.stride(2) == 1 and ids.is_contiguous()
    inner = torch.empty(num_tokens, weights.inner_size, dtype=weights.b.dtype, device=out.device)
    _gather_kernel[(len(tiles.tiles),)](
        ids,
        weights.a,
        inner,
        tiles.order,
        tiles.tiles,
        scale,
        weights.a.stride(0),
        weights.a.stride(1),
        TOKENS=tiles.size,
        RANK=weights.inner_size,
        num_warps=4,
        **dependent(out.device, num_tokens),
    )
    return expand_lora(out, inner, weights, tiles)


def expand_lora(out: torch.Tensor, inner: torch.Tensor, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """As the reference."""
    if not len(inner):
        return out
    _expand(out, inner, weights, tiles, adds=True)
    return out


def lora_delta(inner: torch.Tensor, weights: LoraWeights, tiles: LoraTiles) -> torch.Tensor:
    """As the reference."""
    out = torch.empty(len(inner), weights.b.shape[1], dtype=inner.dtype, device=inner.device)
    if len(inner):
        _expand(out, inner, weights, tiles, adds=False)
    return out


def _expand(out: torch.Tensor, inner: torch.Tensor, weights: LoraWeights, tiles: LoraTiles, *, adds: bool) -> None:
    num_tokens, num_columns = inner.shape
    assert weights.blocks is not None and weights.b.stride(2) == 1 and out.stride(1) == 1
    _expand_kernel[(len(tiles.tiles), len(weights.blocks))](
        out,
        inner,
        weights.b,
        weights.blocks,
        tiles.order,
        tiles.tiles,
        num_columns,
        out.stride(0),
        weights.b.stride(0),
        weights.b.stride(1),
        ALL_RANKS=weights.inner_size,
        TOKENS=tiles.size,
        OUTPUTS=BLOCK,
        RANK=min(weights.inner_size, MAX_COLUMNS),
        ADDS=adds,
        ALIGNED=all((first | end) % 8 == 0 for first, end, _ in weights.runs),
        num_warps=4 if num_tokens <= FEW_TOKENS else 8,  # the sums of a large tile take many registers
        **dependent(out.device, num_tokens),
    )


# grid: (tiles, blocks of columns of A, splits of the inputs)
@triton.jit
def _shrink_kernel(
    x,
    a,
    squares,  # [tokens, PARTS] if x is to be divided by its root mean square, see `Unnormalized`; else None
    inner,
    sums,
    arrived,
    order,
    tiles,
    eps,
    num_tokens,
    num_inputs,
    num_columns,
    x_stride,
    slot_stride,
    row_stride,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,  # inputs of a split; 0: a program sums all inputs
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    slot, position, there, token = _read_tile(tiles, order, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    k = tl.arange(0, INPUTS)
    rows = x + token.to(tl.int64)[:, None] * x_stride
    columns = a + tl.maximum(slot, 0).to(tl.int64) * slot_stride + column.to(tl.int64)[None, :] * row_stride
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    if PART:
        own = tl.program_id(2) * PART + k
        right = tl.load(columns + own[:, None], mask=(own < num_inputs)[:, None] & inside[None, :], other=0.0)
        wait_for_previous(DEPENDENT)  # programs of unused tiles too: the next kernel relies on it
        if slot < 0:
            return
        for first in tl.static_range(0, PART, INPUTS):
            own = tl.program_id(2) * PART + first + k
            if first > 0:
                right = tl.load(columns + own[:, None], mask=(own < num_inputs)[:, None] & inside[None, :], other=0.0)
            left = tl.load(rows + own[None, :], mask=there[:, None] & (own < num_inputs)[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
    else:
        wait_for_previous(DEPENDENT)
        if slot < 0:
            return
        for first in range(0, num_inputs, INPUTS):
            own = first + k
            left = tl.load(rows + own[None, :], mask=there[:, None] & (own < num_inputs)[None, :], other=0.0)
            right = tl.load(columns + own[:, None], mask=(own < num_inputs)[:, None] & inside[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
    mask = there[:, None] & inside[None, :]
    target = position.to(tl.int64)[:, None] * num_columns + column[None, :]
    if SPLITS > 1:
        size = num_tokens.to(tl.int64) * num_columns
        tl.store(sums + tl.program_id(2) * size + target, total, mask=mask)
        # every thread's stores are made before one of them counts
        tl.debug_barrier()
        counter = arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before < SPLITS - 1:
            return
        tl.store(counter, 0)
        total = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(sums + part * size + target, mask=mask, other=0.0, cache_modifier=".cg")
    if squares is not None:
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        own = squares + token.to(tl.int64)[:, None] * PARTS + part[None, :]
        found = tl.load(own, mask=there[:, None] & (part < PARTS)[None, :], other=0.0)
        total *= tl.rsqrt(tl.sum(found, 1) / num_inputs + eps)[:, None]
    tl.store(inner + target, total.to(inner.dtype.element_ty), mask=mask)


# grid: (tiles,)
@triton.jit
def _gather_kernel(
    ids,
    a,
    inner,
    order,
    tiles,
    scale,
    slot_stride,
    row_stride,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    slot, position, there, token = _read_tile(tiles, order, TOKENS)
    wait_for_previous(DEPENDENT)
    if slot < 0:
        return
    id = tl.load(ids + token, mask=there, other=0).to(tl.int64)
    rank = tl.arange(0, RANK)
    source = a + slot.to(tl.int64) * slot_stride + id[:, None] * row_stride + rank[None, :]
    value = tl.load(source, mask=there[:, None], other=0.0).to(tl.float32) * scale
    target = inner + position.to(tl.int64)[:, None] * RANK + rank[None, :]
    tl.store(target, value.to(inner.dtype.element_ty), mask=there[:, None])


# grid: (tiles, blocks of outputs)
@triton.jit
def _expand_kernel(
    out,
    inner,
    b,
    blocks,
    order,
    tiles,
    num_columns,
    out_stride,
    slot_stride,
    row_stride,
    ALL_RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    ADDS: tl.constexpr,  # to `out`; else `out` is written, with zeros for tokens without an adapter
    ALIGNED: tl.constexpr,  # all blocks begin and end at multiples of 8 outputs
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    slot, position, there, token = _read_tile(tiles, order, TOKENS)
    block = blocks + 3 * tl.program_id(1)
    begin, end = tl.load(block), tl.load(block + 1)
    if ALIGNED:  # several outputs per load and store
        begin, end = tl.multiple_of(begin, 8), tl.multiple_of(end, 8)
    output = begin + tl.arange(0, OUTPUTS)
    inside = output < end
    matrix = tl.load(block + 2)
    rank = tl.arange(0, RANK)
    columns = (
        b + tl.maximum(slot, 0).to(tl.int64) * slot_stride + output.to(tl.int64)[None, :] * row_stride + rank[:, None]
    )
    right = tl.load(columns, mask=inside[None, :] & (slot >= 0), other=0.0)
    wait_for_previous(DEPENDENT)  # programs of unused tiles too: the next kernel relies on it
    target = out + token.to(tl.int64)[:, None] * out_stride + output[None, :]
    mask = there[:, None] & inside[None, :]
    if slot < 0:
        if not ADDS:
            tl.store(target, tl.zeros((TOKENS, OUTPUTS), out.dtype.element_ty), mask=mask)
        return
    if ADDS:
        before = tl.load(target, mask=mask, other=0.0)
    source = inner + position.to(tl.int64)[:, None] * num_columns + matrix * ALL_RANKS + rank[None, :]
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for first in tl.static_range(0, ALL_RANKS, RANK):
        if first > 0:
            right = tl.load(columns + first, mask=inside[None, :], other=0.0)
        left = tl.load(source + first, mask=there[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if ADDS:
        total += before.to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _read_tile(tiles, order, TOKENS: tl.constexpr):
    """Of this program's tile: the adapter's slot, -1 for none; positions in `order`, which of them exist, and their
    tokens."""
    tile = tiles + 3 * tl.program_id(0)
    slot = tl.load(tile)
    position = tl.load(tile + 1) + tl.arange(0, TOKENS)
    there = position < tl.load(tile + 2)  # none of an unused tile
    return slot, position, there, tl.load(order + position, mask=there, other=0)
