"""LoRA on CUDA after a GEMM that has multiplied with all matrices A too: one kernel adds B A x and finishes the sums.

It computes what the GEMM would have computed in its epilogue: the gated activation, or the residual and what the next
GEMM needs of its norm (`ops/gemm/linear/tiles.py`). B, the norm's weights and the tiles are older than the step and
are read before the kernel waits for the GEMM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.gemm.chains import Unnormalized
from slipstream.ops.gemm.linear.epilogue import GATES
from slipstream.ops.gemm.lora.reference import BLOCK, MAX_COLUMNS, LoraTiles, LoraWeights
from slipstream.ops.gemm.lora.triton import _read_tile
from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous


def finish_lora(sums: torch.Tensor, weights: LoraWeights, tiles: LoraTiles, gate: str = "") -> torch.Tensor:
    """As the reference."""
    num_outputs = weights.b.shape[1]
    out = torch.empty(len(sums), num_outputs // 2 if gate else num_outputs, dtype=sums.dtype, device=sums.device)
    _launch(sums, weights, tiles, out, gate)
    return out


def finish_lora_add(
    sums: torch.Tensor,
    weights: LoraWeights,
    tiles: LoraTiles,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> Unnormalized:
    """As the reference."""
    assert weights.blocks is not None and residual.is_contiguous()
    total, weighted = (torch.empty(residual.shape, dtype=sums.dtype, device=sums.device) for _ in range(2))
    squares = torch.empty(len(sums), len(weights.blocks), dtype=torch.float32, device=sums.device)
    made = Unnormalized(total, norm, eps, weighted, squares)
    _launch(sums, weights, tiles, total, "", residual, made)
    return made


def _launch(
    sums: torch.Tensor,
    weights: LoraWeights,
    tiles: LoraTiles,
    out: torch.Tensor,
    gate: str,
    residual: torch.Tensor | None = None,
    made: Unnormalized | None = None,
) -> None:
    if not len(sums):
        return
    assert weights.blocks is not None and weights.b.stride(2) == 1 and sums.stride(1) == 1
    # of a gated product, the blocks of the gate; those of the up rows have the same order
    num_blocks = len(weights.blocks) // 2 if gate else len(weights.blocks)
    _finish_kernel[(len(tiles.tiles), num_blocks)](
        sums,
        weights.b,
        weights.blocks,
        tiles.order,
        tiles.tiles,
        residual,
        None if made is None else made.norm,
        out,
        None if made is None else made.weighted,
        None if made is None else made.squares,
        weights.b.shape[1],
        weights.a.shape[1],
        sums.stride(0),
        out.shape[1],
        weights.b.stride(0),
        weights.b.stride(1),
        GATE=GATES[gate],
        ALL_RANKS=weights.inner_size,
        TOKENS=tiles.size,
        OUTPUTS=BLOCK,
        RANK=min(weights.inner_size, MAX_COLUMNS),
        ALIGNED=all((first | end) % 8 == 0 for first, end, _ in weights.runs),
        num_warps=4,
        **dependent(sums.device, len(sums)),
    )


# grid: (tiles, blocks of outputs)
@triton.jit
def _finish_kernel(
    sums,  # [tokens, outputs, then A x of all slots]
    b,
    blocks,
    order,
    tiles,
    residual,
    norm,
    out,
    weighted,
    squares,
    num_outputs,
    num_columns,
    sums_stride,
    out_stride,
    slot_stride,
    row_stride,
    GATE: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    ALIGNED: tl.constexpr,  # all blocks begin and end at multiples of 8 outputs
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    slot, position, there, token = _read_tile(tiles, order, TOKENS)
    block = blocks + 3 * tl.program_id(1)
    begin, end, matrix = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if ALIGNED:  # several outputs per load and store
        begin, end = tl.multiple_of(begin, 8), tl.multiple_of(end, 8)
    output = begin + tl.arange(0, OUTPUTS)
    inside = output < end
    rows = b + tl.maximum(slot, 0).to(tl.int64) * slot_stride
    right = _load_b(rows, output, inside & (slot >= 0), row_stride, RANK)
    if GATE:
        up_matrix = tl.load(block + 3 * tl.num_programs(1) + 2)
        up_output = output + num_outputs // 2
        up_right = _load_b(rows, up_output, inside & (slot >= 0), row_stride, RANK)
    if norm is not None:
        factor = tl.load(norm + output, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    own = sums + token.to(tl.int64)[:, None] * sums_stride
    inner = own + num_outputs + tl.maximum(slot, 0) * num_columns
    has_adapter = there & (slot >= 0)
    mask = there[:, None] & inside[None, :]
    value = tl.load(own + output[None, :], mask=mask, other=0.0).to(tl.float32)
    target = token.to(tl.int64)[:, None] * out_stride + output[None, :]
    if GATE:
        up = tl.load(own + up_output[None, :], mask=mask, other=0.0).to(tl.float32)
        up = _add_product(
            up,
            inner,
            up_matrix,
            right=up_right,
            rows=rows,
            output=up_output,
            inside=inside,
            has_adapter=has_adapter,
            row_stride=row_stride,
            ALL_RANKS=ALL_RANKS,
            RANK=RANK,
        )
    if residual is not None:
        added = tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    value = _add_product(
        value,
        inner,
        matrix,
        right=right,
        rows=rows,
        output=output,
        inside=inside,
        has_adapter=has_adapter,
        row_stride=row_stride,
        ALL_RANKS=ALL_RANKS,
        RANK=RANK,
    )
    if GATE:
        slope = value
        if GATE == 2:
            # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
            slope = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value * tl.sigmoid(slope) * up
    if residual is not None:
        value += added
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + target, rounded, mask=mask)
    if norm is not None:
        value = rounded.to(tl.float32)
        tl.store(weighted + target, (value * factor[None, :]).to(out.dtype.element_ty), mask=mask)
        part = squares + token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(part, tl.sum(tl.where(mask, value * value, 0.0), 1), mask=there)


@triton.jit
def _load_b(rows, output, inside, row_stride, RANK: tl.constexpr):
    """The first RANK columns of B [RANK, outputs]."""
    source = rows + output.to(tl.int64)[None, :] * row_stride + tl.arange(0, RANK)[:, None]
    return tl.load(source, mask=inside[None, :], other=0.0)


@triton.jit
def _add_product(
    value,
    inner,
    matrix,
    right,
    rows,
    output,
    inside,
    has_adapter,
    row_stride,
    ALL_RANKS: tl.constexpr,
    RANK: tl.constexpr,
):
    """value + B A x of the tokens of the tile. `right`: the first columns of B."""
    source = inner + matrix * ALL_RANKS + tl.arange(0, RANK)[None, :]
    for first in tl.static_range(0, ALL_RANKS, RANK):
        if first > 0:
            right = _load_b(rows + first, output, inside, row_stride, RANK)
        left = tl.load(source + first, mask=has_adapter[:, None], other=0.0)
        value = tl.dot(left, right, value, input_precision="ieee")
    return value
