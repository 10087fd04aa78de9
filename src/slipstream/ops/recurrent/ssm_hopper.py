"""The pass of Mamba-2 over chunks on Hopper: one producer warp, and a warpgroup for each of two heads.

As the pass in `ssm_chunked.py`, which computes rows of one token for both. The two heads share b, c and the scores,
which come by TMA. All products are transposed: a head's state [dim, state size] and x stay in registers, as sums and
as first operands of MMAs, so only the weighed scores pass through shared memory, while c reads the state. Written in
Gluon: `tests/ops/test_kernels_compile.py` compiles it on any machine, `pytest -m cuda` runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.recurrent.steps import RecurrentSteps
from slipstream.ops.recurrent.steps_triton import row_programs

CHUNK = gl.constexpr(STATE_CHUNK)
DIM = gl.constexpr(64)
STATE = gl.constexpr(128)
STAGES = gl.constexpr(3)
# One program per multiprocessor. An even split of the registers gives 168 per thread; the producer warp gives most of
# its registers to the consumers.
EVEN_REGISTERS = 168
COMPUTE_REGISTERS = gl.constexpr(240)
FETCH_REGISTERS = gl.constexpr(24)


def pass_chunks(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    scores: torch.Tensor,  # [T, groups, CHUNK], 0 for later tokens
    logs: torch.Tensor,  # [chunks, heads, 2, CHUNK]: log2 of the decay to a token, and that - log2 of its step size
    d: torch.Tensor,
    state: torch.Tensor,
    steps: RecurrentSteps,
    out: torch.Tensor,
) -> None:
    """Computes rows of two and more tokens."""
    num_heads, num_rows = x.shape[1], len(steps.slots)
    _pass_kernel[(num_heads // 2, row_programs(num_rows, num_heads // 2, x.device))](
        _describe(x, DIM.value),
        _describe(b, STATE.value),
        _describe(c, STATE.value),
        _describe(scores, STATE_CHUNK),
        TensorDescriptor.from_tensor(
            logs.view(len(logs) * num_heads // 2, 4 * STATE_CHUNK), [1, 4 * STATE_CHUNK], gl.NVMMASharedLayout(0, 32, 2)
        ),
        _describe(out, DIM.value),
        out,
        logs,
        d,
        state,
        steps.slots,
        steps.starts,
        steps.first_positions,
        steps.seen_positions,
        steps.chunks,
        steps.chunk_starts,
        num_rows,
        state.stride(0),
        HEADS=num_heads,
        HEADS_OF_GROUP=num_heads // b.shape[1],
        num_warps=4,
        maxnreg=EVEN_REGISTERS,
    )


def _describe(part: torch.Tensor, width: int) -> Any:
    """TMA descriptor for copies of one head or group of a chunk."""
    box = [STATE_CHUNK, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    return TensorDescriptor(part, [part.shape[0], part.shape[1] * part.shape[2]], [part.stride(0), 1], box, layout)


# grid: (pairs of heads, programs that take turns in rows)
@gluon.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots", "starts", "first_positions", "seen_positions"],
)
def _pass_kernel(
    x,
    b,
    c,
    scores,
    log_rows,
    out_tiles,
    out,
    logs,
    d,
    state,
    slots,
    starts,
    first_positions,
    seen_positions,
    chunks,
    chunk_starts,
    num_rows,
    slot_stride,
    HEADS: gl.constexpr,
    HEADS_OF_GROUP: gl.constexpr,
):
    SMALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, DIM], gl.bfloat16)
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, STATE], gl.bfloat16)
    xs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, DIM], SMALL)
    bs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, STATE], WIDE)
    cs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, STATE], WIDE)
    seen = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], SMALL)
    log_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 4 * CHUNK], gl.NVMMASharedLayout(0, 32, 2))
    weighed = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], SMALL)
    results = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, DIM], SMALL)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there.index(stage), count=1)
        mbarrier.init(used.index(stage), count=2)
    fence_async_shared()
    tiles = (xs, bs, cs, seen, log_tiles, there, used)
    rows = (starts, first_positions, chunks, chunk_starts, num_rows)
    sources = (x, b, c, scores, log_rows)
    states = (state, slots, seen_positions, slot_stride)
    results_0 = (weighed.index(0), results.index(0), out_tiles, out)
    results_1 = (weighed.index(1), results.index(1), out_tiles, out)
    gl.warp_specialize(
        [
            (_compute, (tiles, rows, states, results_0, logs, d, 0, HEADS)),
            (_compute, (tiles, rows, states, results_1, logs, d, 1, HEADS)),
            (_fetch, (tiles, rows, sources, HEADS, HEADS_OF_GROUP)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, FETCH_REGISTERS],
    )


@gluon.jit
def _count_rows(chunks, chunk_starts, num_rows):
    """The rows up to the last one that has tokens."""
    num_entries = gl.load(chunk_starts + num_rows)
    return gl.where(num_entries > 0, gl.load(chunks + gl.maximum(num_entries - 1, 0) * 4) + 1, 0)


@gluon.jit
def _fetch(tiles, rows, sources, HEADS: gl.constexpr, HEADS_OF_GROUP: gl.constexpr):
    """The producer warp: loads the chunks of all rows of this program, as far ahead as the pipeline has stages."""
    xs, bs, cs, seen, log_tiles, there, used = tiles
    starts, first_positions, chunks, chunk_starts, num_rows = rows
    x, b, c, scores, log_rows = sources
    pair = gl.program_id(0)
    head = pair * 2
    group = head // HEADS_OF_GROUP
    count = _count_rows(chunks, chunk_starts, num_rows)
    done = 0
    for turn in range(gl.program_id(1), count, gl.num_programs(1)):
        row = count - 1 - turn
        start = gl.load(starts + row)
        end = gl.load(starts + row + 1)
        if end - start > 1:
            entry = gl.load(chunk_starts + row)
            for first in range(start - gl.load(first_positions + row) % CHUNK, end, CHUNK):
                stage = done % STAGES
                bar = there.index(stage)
                mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
                mbarrier.expect(bar, 2 * CHUNK * (2 * DIM + 2 * STATE + CHUNK) + 4 * CHUNK * 4)
                tma.async_copy_global_to_shared(c, [first, group * STATE], bar, cs.index(stage))
                tma.async_copy_global_to_shared(log_rows, [entry * (HEADS // 2) + pair, 0], bar, log_tiles.index(stage))
                tma.async_copy_global_to_shared(scores, [first, group * CHUNK], bar, seen.index(stage))
                for own in gl.static_range(2):
                    tma.async_copy_global_to_shared(x, [first, (head + own) * DIM], bar, xs.index(2 * stage + own))
                tma.async_copy_global_to_shared(b, [first, group * STATE], bar, bs.index(stage))
                entry += 1
                done += 1


@gluon.jit
def _compute(tiles, rows, states, results, logs, d, OWN: gl.constexpr, HEADS: gl.constexpr):
    """A consumer warpgroup: one of the two heads."""
    xs, bs, cs, seen, log_tiles, there, used = tiles
    starts, first_positions, chunks, chunk_starts, num_rows = rows
    state, slots, seen_positions, slot_stride = states
    weighed, result, out_tiles, out = results
    MADE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    LOADED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STATE, 16])
    READ: gl.constexpr = gl.DotOperandLayout(0, MADE, 2)
    WRITTEN: gl.constexpr = gl.DotOperandLayout(0, LOADED, 2)
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    logs_of_heads = log_tiles._reinterpret(gl.float32, [4 * STAGES, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    head = gl.program_id(0) * 2 + OWN
    skip = gl.load(d + head)
    dim = head * DIM + gl.arange(0, DIM, gl.SliceLayout(1, LOADED))
    cells = gl.expand_dims(dim, 1) * STATE + gl.expand_dims(gl.arange(0, STATE, gl.SliceLayout(0, LOADED)), 0)
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, BY_ROW))
    column = head * DIM + gl.arange(0, DIM, gl.SliceLayout(0, BY_ROW))
    count = _count_rows(chunks, chunk_starts, num_rows)
    done = 0
    for turn in range(gl.program_id(1), count, gl.num_programs(1)):
        row = count - 1 - turn
        start = gl.load(starts + row)
        end = gl.load(starts + row + 1)
        if end - start > 1:
            begin = start - gl.load(first_positions + row) % CHUNK
            cell = state + gl.load(slots + row).to(gl.int64) * slot_stride + cells
            has_state = gl.full([DIM, STATE], gl.load(seen_positions + row), gl.int32, LOADED) > 0
            current = gl.load(cell, mask=has_state, other=0.0)
            entry = gl.load(chunk_starts + row).to(gl.int64)
            # loaded a chunk ahead
            next_saved = gl.load(chunks + entry * 4 + 3)
            next_whole = gl.load(logs + (entry * HEADS + head) * (2 * CHUNK) + (CHUNK - 1))
            for first in range(begin, end, CHUNK):
                stage = done % STAGES
                saved = next_saved
                whole = next_whole
                if first + CHUNK < end:
                    entry += 1
                next_saved = gl.load(chunks + entry * 4 + 3)
                next_whole = gl.load(logs + (entry * HEADS + head) * (2 * CHUNK) + (CHUNK - 1))
                is_partial = (first < start) | (first + CHUNK > end)
                x = xs.index(2 * stage + OWN)
                total, offset = logs_of_heads.index(4 * stage + 2 * OWN), logs_of_heads.index(4 * stage + 2 * OWN + 1)
                mbarrier.wait(there.index(stage), done // STAGES & 1)
                if is_partial:
                    _clear_others(x, start - first, end - first, BY_ROW)
                    _clear_others(bs.index(stage), start - first, end - first, BY_ROW)
                    fence_async_shared()
                    gl.thread_barrier()

                # the state read by c, times the decay from the chunk's start
                read = gl.convert_layout(current.to(gl.bfloat16), READ)
                made = gl.zeros([DIM, CHUNK], gl.float32, MADE)
                made = warpgroup_mma(read, cs.index(stage).permute((1, 0)), made, use_acc=False, is_async=True)
                tma.store_wait(0)  # the previous result has been copied from shared memory
                score = seen.index(stage).load(BY_ROW).to(gl.float32)
                decay = gl.expand_dims(total.load(gl.SliceLayout(1, BY_ROW)), 1) - gl.expand_dims(
                    offset.load(gl.SliceLayout(0, BY_ROW)), 0
                )
                # scores of later tokens are 0: their decay must be finite
                weighed.store((score * gl.exp2(gl.minimum(decay, 64.0))).to(gl.bfloat16))
                fence_async_shared()
                now = x.permute((1, 0)).load(READ)
                fade = gl.exp2(total.load(gl.SliceLayout(0, MADE)))
                made = warpgroup_mma_wait(0, deps=(made,))
                made *= gl.expand_dims(fade, 0)
                made = warpgroup_mma(now, weighed.permute((1, 0)), made, is_async=True)

                # the state at the chunk's end
                left = gl.exp2(whole - offset.load(gl.SliceLayout(0, WRITTEN)))
                written = (gl.convert_layout(now, WRITTEN).to(gl.float32) * gl.expand_dims(left, 0)).to(gl.bfloat16)
                current *= gl.exp2(whole)
                current = warpgroup_mma(written, bs.index(stage), current, is_async=True)

                made = warpgroup_mma_wait(1, deps=(made,))
                made += skip * gl.convert_layout(now, MADE).to(gl.float32)
                result.permute((1, 0)).store(made.to(gl.bfloat16))
                if is_partial:
                    inside = (token >= start - first) & (token < end - first)
                    at = (first + token).to(gl.int64) * (HEADS * DIM)
                    target = out + gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
                    gl.thread_barrier()
                    gl.store(target, result.load(BY_ROW), mask=gl.expand_dims(inside, 1))
                else:
                    fence_async_shared()
                    tma.async_copy_shared_to_global(out_tiles, [first, head * DIM], result)
                current = warpgroup_mma_wait(0, deps=(current,))
                mbarrier.arrive(used.index(stage), count=1)
                if saved >= 0:
                    gl.store(state + saved.to(gl.int64) * slot_stride + cells, current)
                done += 1
            gl.store(cell, current)
    tma.store_wait(0)


@gluon.jit
def _clear_others(tile, begin, end, BY_ROW: gl.constexpr):
    """Zeros for tokens of other rows: 0 times what lies there may be NaN."""
    WIDTH: gl.constexpr = tile.shape[1]
    for first in gl.static_range(0, WIDTH, DIM):
        part = tile.slice(first, DIM, 1)
        current = part.load(BY_ROW)
        own = gl.arange(0, CHUNK, gl.SliceLayout(1, BY_ROW))
        inside = gl.expand_dims((own >= begin) & (own < end), 1)
        part.store(gl.where(inside, current, gl.zeros_like(current)))
