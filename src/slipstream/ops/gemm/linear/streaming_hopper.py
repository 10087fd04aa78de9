"""Skinny GEMM for 2 to 256 rows on Hopper: TMA loads the weight many stages ahead, and before x is ready.

The weight is the left operand of the MMA, so that padding of few rows wastes no work. The steps around the GEMM in a
decoder layer are fused: the division of the previous norm before it; bias, gated activation or residual, and the
weighting of the next norm after it (`tiles.py`). Written in Gluon, which has no interpreter:
`tests/ops/test_kernels_compile.py` compiles it on any machine, `pytest -m cuda` runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.gemm.chains import StreamingRows, Unnormalized
from slipstream.ops.gemm.linear import streaming_kernel
from slipstream.ops.gemm.linear.epilogue import GATES, counters
from slipstream.ops.gemm.linear.streaming_kernel import BYTES, CHUNK
from slipstream.ops.gemm.linear.tiles import (
    MAX_WIDE_PLAIN_ROWS,
    MULTIPROCESSORS,
    SMALL_WEIGHT,
    WIDE_OUTPUTS,
    fills_wide_programs,
    has_wide_waves,
    keeps_wide_programs_busy,
    narrow_outputs,
    narrow_splits,
)
from slipstream.ops.platform.pdl import dependent

TINY_WEIGHT, MAX_TINY_INPUTS = 2 << 20, 1536
"""Elements, and inputs, of a weight whose GEMM is bound by latency: few stages, no split-k, no padding to 16 rows."""
MEMORY = 195 << 10  # bytes of shared memory for the pipelines of all programs on a multiprocessor
MAX_MEMORY = 224 << 10  # if stages of three blocks and 256 rows need it: four, whose memory holds the sums at the end
MAX_PART = 128  # rows of an MMA of three blocks: registers of 256 would not be enough for three groups of warps


class StreamingTile(NamedTuple):
    splits: int  # split-k
    outputs: int = 64  # per block, gate and up rows together; 48 or 96 in plain GEMMs, and if partial sums are stored
    rows: int = 0  # per program; 0: all
    copies: int = 2  # TMA copies of the weight per pipeline stage
    groups: int = 1  # blocks of outputs per program, 1 or 3
    programs: int = 1  # per multiprocessor


WIDE_TILE = StreamingTile(1, WIDE_OUTPUTS // 3, copies=1, groups=3)
ROW_TILE = WIDE_TILE
"""Of few rows of FP8, for a gated weight: one wave, in which a multiprocessor loads or quantises them once."""
MAX_WIDE_FP8_ROWS = 16
MAX_FEW_WIDE_ROWS = 16
SPLIT_TILE = StreamingTile(2, 128, 128, 1)  # of 65 and more rows, if there are few outputs
MEDIUM_TILE = StreamingTile(1, 64, 64, 1, groups=3)  # of 129 and more rows, if such tiles are one wave
NARROW_TILE = StreamingTile(1, 64, 128, 1)  # of 65 to 128 rows, if such tiles are one wave
MAX_FEW_ROWS = 64


class Scales(NamedTuple):
    """Of FP8 operands, in float32."""

    weight: torch.Tensor  # [out, 1]
    x: torch.Tensor | None = None  # [rows, 1]; None: x is one row of bfloat16, which the kernel quantises


def streaming_gemm(
    x: torch.Tensor | Unnormalized,  # [rows, in]
    weight: torch.Tensor,  # [out, in]; gated: gate rows, then up rows, [2 * out, in]
    bias: torch.Tensor | None,
    gate: str,
    tile: StreamingTile | None = None,
    scales: Scales | None = None,  # if x and weight are FP8
    added: torch.Tensor | None = None,  # [rows, len(weight)]
    adapters: torch.Tensor | None = None,  # [slots, rows, in], if there is neither a bias nor a gate
) -> torch.Tensor:
    """The GEMM of x, or of the norm of an `Unnormalized` x, in its dtype; in bfloat16 if the weight is FP8. `added` is
    added before the gate. The rows of `adapters` count as rows of the weight after its own: their results follow in
    each row of the output, slot after slot."""
    assert added is None or added.is_contiguous()
    rows = len(x) if isinstance(x, torch.Tensor) else len(x.total)
    num_out = len(weight) // 2 if gate else len(weight)
    if adapters is not None:
        num_out += adapters.shape[0] * adapters.shape[1]
    dtype = torch.bfloat16 if scales is not None else weight.dtype
    out = torch.empty((rows, num_out), dtype=dtype, device=weight.device)
    is_small = scales is not None and rows <= MAX_WIDE_FP8_ROWS
    if tile is None and gate and is_small and keeps_wide_programs_busy(len(weight)):
        tile = ROW_TILE
    is_plain = isinstance(x, torch.Tensor) and adapters is None and scales is None
    find = plain_tile if is_plain else streaming_tile
    tile = tile or find(rows, len(weight), weight.shape[1] * weight.element_size() // 2, gate)
    _launch(x, weight, bias, gate, out, tile, added, scales=scales, adapters=adapters)
    return out


def streaming_gemm_add(
    x: torch.Tensor,  # [rows, in]
    weight: torch.Tensor,  # [out, in]
    residual: torch.Tensor,  # [rows, out]
    norm: torch.Tensor,  # [out]
    eps: float,
    tile: StreamingTile | None = None,
    scales: Scales | None = None,  # if the weight is FP8
) -> Unnormalized:
    """residual + the GEMM, with what the next GEMM needs to finish the norm of the sum."""
    tile = tile or streaming_tile(len(x), len(weight), weight.shape[1] * weight.element_size() // 2, "")
    assert residual.is_contiguous() and residual.shape == (len(x), len(weight)), f"{residual.shape}"
    total, weighted = (torch.empty(residual.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    num_blocks = triton.cdiv(len(weight), tile.outputs * tile.groups) * tile.groups
    squares = torch.empty(len(x), num_blocks, dtype=torch.float32, device=x.device)
    made = Unnormalized(total, norm, eps, weighted, squares)
    _launch(x, weight, None, "", total, tile, residual, made, scales)
    return made


def streaming_gemm_parts(
    x: torch.Tensor, weight: torch.Tensor, tile: StreamingTile | None = None, scales: Scales | None = None
) -> torch.Tensor:
    """The GEMM of x [rows, in] as partial sums [splits, rows, out] in float32, which the next kernel adds: no program
    waits for the others or reads what they have stored. `scales`: if x and weight are FP8."""
    tile = tile or StreamingTile(narrow_splits(len(x), *weight.shape))
    assert tile.splits > 1 and tile.groups == 1, f"{tuple(weight.shape)} with {len(x)} rows is not split"
    parts = torch.empty((tile.splits, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, "", parts, tile, scales=scales)
    return parts


def _launch(
    inputs: torch.Tensor | Unnormalized,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str,
    out: torch.Tensor,
    tile: StreamingTile,
    residual: torch.Tensor | None = None,
    made: Unnormalized | None = None,
    scales: Scales | None = None,
    adapters: torch.Tensor | None = None,
) -> None:
    x, squares, eps = StreamingRows.of(inputs)
    rows, num_in = x.shape
    outputs, groups = tile.outputs, tile.groups
    padded = triton.next_power_of_2(outputs)
    is_plain = not gate and made is None and adapters is None and groups == 1 and (tile.splits == 1 or out.dim() == 3)
    assert padded == outputs or is_plain, f"{tile}"
    quantizes = x.dtype != weight.dtype
    assert not quantizes or rows == 1, f"{rows} rows of {x.dtype} for a weight of {weight.dtype}"
    per_program, more = (8, 0) if quantizes else row_parts(tile, rows)
    blocks, row_blocks = triton.cdiv(len(weight), outputs * groups), triton.cdiv(rows, per_program + more)
    weight_blocks = blocks
    if adapters is not None:
        assert can_append(tile, weight, adapters) and bias is None and not gate
        blocks += triton.cdiv(adapters.shape[0] * adapters.shape[1], outputs)
    steps = triton.cdiv(num_in * weight.element_size(), BYTES.value * tile.copies)
    split_steps = triton.cdiv(steps, tile.splits)
    partials = arrived = None
    if tile.splits > 1 and out.dim() == 2:
        num_blocks = blocks * groups * row_blocks
        shape = (tile.splits, num_blocks, outputs * (per_program + more))
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = counters(weight)
        assert num_blocks <= len(arrived), f"{num_blocks} blocks, but {len(arrived)} counters"
    streaming_kernel.streaming_kernel[(row_blocks, blocks, tile.splits)](
        None if quantizes else _describe(x, per_program),
        _describe(x, more) if more else None,
        _describe(weight, 16 if padded > outputs else outputs // 2 if gate else outputs),
        None if adapters is None else _describe_adapters(adapters),
        squares,
        eps,
        bias,
        residual,
        None if made is None else made.norm,
        out,
        None if made is None else made.weighted,
        None if made is None else made.squares,
        partials,
        arrived,
        None if scales is None else scales.weight,
        None if scales is None else scales.x,
        x if quantizes else None,
        rows,
        out.shape[-1],
        num_in,
        steps,
        split_steps,
        weight_blocks,
        0 if adapters is None else adapters.shape[1] // 16,
        PARTS=0 if squares is None else squares.shape[1],
        CHUNKS=chunks_of(steps * tile.copies) if quantizes else 0,
        OWN_CHUNKS=chunks_of(split_steps * tile.copies) if quantizes else 0,
        GATE=GATES[gate],
        SPLITS=tile.splits,
        OUTPUTS=outputs,
        GROUPS=groups,
        ROWS=per_program,
        MORE_ROWS=more,
        COPIES=tile.copies,
        STAGES=row_stages(tile, split_steps) if quantizes else stages_for(tile, per_program + more),
        num_warps=padded // 16,
        maxnreg=registers_for(tile, per_program + more),
        **dependent(x.device, rows),
    )


def plain_tile(rows: int, num_out: int, num_in: int, gate: str) -> StreamingTile:
    """Of a GEMM with 16-bit weights that finishes no norm and has no adapters."""
    if not gate and narrow_splits(rows, num_out, num_in) == 1:
        return StreamingTile(1, narrow_outputs(num_out), copies=1)
    if not gate and rows <= MAX_WIDE_PLAIN_ROWS and fills_wide_programs(rows, num_out, num_in):
        return WIDE_TILE
    if not gate and rows <= MAX_FEW_WIDE_ROWS and has_wide_waves(num_out, num_in):
        return WIDE_TILE
    return streaming_tile(rows, num_out, num_in, gate)


def streaming_tile(rows: int, num_out: int, num_in: int, gate: str) -> StreamingTile:
    """Enough programs to fill the GPU; measured with benchmarks/ops/layer.py. With few rows and outputs split-k makes a
    program's part so small that all its weights are in flight at once."""
    if gate and fills_wide_programs(rows, num_out, num_in):
        return WIDE_TILE
    blocks = triton.cdiv(num_out, 64)
    if 1 < rows <= 8 and num_out * num_in <= TINY_WEIGHT and num_in <= MAX_TINY_INPUTS:
        tiles = triton.cdiv(num_in * 2, BYTES.value)
        return StreamingTile(1, rows=8, copies=4 if tiles % 3 else 3)
    is_small = num_out * num_in <= SMALL_WEIGHT
    if rows <= 32 or (rows <= 64 and is_small and not gate):
        max_splits = MULTIPROCESSORS // blocks
        splits = max(1, min(triton.cdiv(num_in, 1024), max_splits)) if blocks <= 64 else 1
        copies = 4 if splits == 1 and max_splits else 2
        # more blocks than multiprocessors: a second wave of few programs would leave most of them idle
        programs = 2 if not gate and MULTIPROCESSORS < blocks <= 2 * MULTIPROCESSORS else 1
        return StreamingTile(splits, rows=min(32, _padded(rows)), copies=copies, programs=programs)
    if rows <= 64 and not is_small:
        return StreamingTile(max(1, min(triton.cdiv(num_in, 6144), MULTIPROCESSORS // blocks)))
    if gate:
        return StreamingTile(1, 128, 32 if rows <= 64 else 64 if rows <= 128 else 128, 1)
    if blocks >= 64:
        return StreamingTile(1, 64, 64) if rows <= 128 else StreamingTile(1, 128, 64, 1)
    return StreamingTile(1, 64, 64 if rows > 128 and num_in <= 2048 else 32)


def parts_tile(rows: int, weight: torch.Tensor) -> StreamingTile | None:
    """The tile of a GEMM of FP8 whose partial sums the next kernel adds; None: the GEMM is not split."""
    if rows > MAX_FEW_ROWS:
        tiles = triton.cdiv(len(weight), 128) * triton.cdiv(rows, 128)
        return SPLIT_TILE if 2 * tiles <= MULTIPROCESSORS else None
    tile = streaming_tile(rows, len(weight), weight.shape[1] // 2, "")
    return tile if tile.splits > 1 else None


def can_append(tile: StreamingTile, weight: torch.Tensor, adapters: torch.Tensor) -> bool:
    """Whether programs of this tile can have rows of adapters [slots, rows, in] instead of rows of the weight: no
    program has both, and TMA copies 16 rows of a slot at a time."""
    is_aligned = (adapters.stride(0) | adapters.stride(1)) % 8 == 0 and adapters.data_ptr() % 16 == 0
    are_alike = adapters.dtype is weight.dtype and adapters.stride(2) == 1 and weight.element_size() == 2
    is_divided = len(weight) % tile.outputs == 0 and adapters.shape[1] % 16 == 0
    return tile.groups == 1 and is_aligned and are_alike and is_divided


def stages_for(tile: StreamingTile, rows: int) -> int:
    outputs = triton.next_power_of_2(tile.outputs) * tile.groups
    memory = MAX_MEMORY if tile.groups == 3 and rows > MAX_PART else MEMORY
    return memory // tile.programs // ((outputs + rows) * BYTES.value * tile.copies)


def row_stages(tile: StreamingTile, split_steps: int) -> int:
    """Of a row that is quantised: 8 rows of FP8 for all of its inputs, and stages of the weight alone."""
    free = MEMORY // tile.programs - chunks_of(split_steps * tile.copies) * CHUNK.value * 8 * BYTES.value
    return min(split_steps, free // (tile.outputs * tile.groups * BYTES.value * tile.copies))


def chunks_of(num_tiles: int) -> int:
    return triton.cdiv(num_tiles, CHUNK.value)


def registers_for(tile: StreamingTile, rows: int) -> int:
    """Registers per thread at the launch. Three blocks have 16 warps in all, of which the producer's give most of their
    registers to the consumers."""
    return 128 if tile.groups == 3 else 96 if rows <= 80 else 168


def row_parts(tile: StreamingTile, rows: int) -> tuple[int, int]:
    """The rows of a program as two powers of two; the second may be 0. Up to 32 rows are padded to one."""
    if tile.rows or rows <= 32:
        return tile.rows or _padded(rows), 0
    largest = MAX_PART if tile.groups == 3 else rows
    first = min(triton.next_power_of_2(rows + 1) // 2, largest)
    more = max(8, triton.next_power_of_2(rows - first)) if rows > first else 0
    return (2 * first, 0) if more == first < largest else (first, more)


def _padded(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _describe(matrix: torch.Tensor, num_rows: int) -> Any:
    box = [num_rows, BYTES.value // matrix.element_size()]
    dtype = gl.bfloat16 if matrix.element_size() == 2 else gl.float8e4nv
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, dtype))


def _describe_adapters(adapters: torch.Tensor) -> Any:
    """16 rows of a slot at a time."""
    box = [1, 16, BYTES.value // adapters.element_size()]
    layout = gl.NVMMASharedLayout(BYTES.value, 16, 3)
    return TensorDescriptor(adapters, list(adapters.shape), list(adapters.stride()), box, layout)
