"""The end of Gluon GEMMs whose warps have different inputs: adds the sums of warps and splits, then the epilogue."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.ops.linear.triton.streaming_epilogue import store_results, target_of


@gluon.jit
def finish(
    sums,  # shared memory [warps, OUTPUTS, ROWS] float32, which all warps have written
    operands,
    given,
    results,
    row,
    block,
    GATE: gl.constexpr,
    SPLITS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Stores the results of a block of outputs; with split-k the last of its programs does."""
    WARPS: gl.constexpr = sums.shape[0]
    partials, arrived = results[3], results[4]
    rows, own, target, mask = target_of(given, row, block, GATE, OUTPUTS, ROWS)
    BY_ROW: gl.constexpr = mask.type.layout
    SIZE: gl.constexpr = OUTPUTS // 2 if GATE else OUTPUTS
    result = sums.index(0).slice(0, SIZE).load(BY_ROW)
    up = result  # unused without a gate
    if GATE:
        up = sums.index(0).slice(SIZE, SIZE).load(BY_ROW)
    for warp in gl.static_range(1, WARPS):
        result += sums.index(warp).slice(0, SIZE).load(BY_ROW)
        if GATE:
            up += sums.index(warp).slice(SIZE, SIZE).load(BY_ROW)
    is_last = True
    if SPLITS > 1:
        number = block * gl.num_programs(0) + gl.program_id(0)
        numbers = gl.num_programs(0) * gl.num_programs(1) * GROUPS
        lane = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1, BY_ROW)), 1)
        where = partials + lane + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, BY_ROW)) * OUTPUTS, 0)
        start = (gl.program_id(2) * numbers + number).to(gl.int64) * (OUTPUTS * ROWS)
        gl.store(where + start, result)
        if GATE:
            gl.store(where + start + SIZE, up)
        # all threads store their partial sums before one increments the counter
        gl.thread_barrier()
        is_last = gl.atomic_add(arrived + number, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        gl.thread_barrier()
        if is_last:
            result = gl.zeros([SIZE, ROWS], gl.float32, BY_ROW)
            if GATE:
                up = gl.zeros([SIZE, ROWS], gl.float32, BY_ROW)
            for split in gl.static_range(SPLITS):
                start = (split * numbers + number).to(gl.int64) * (OUTPUTS * ROWS)
                result += gl.load(where + start, cache_modifier=".cg")
                if GATE:
                    up += gl.load(where + start + SIZE, cache_modifier=".cg")
            gl.store(arrived + number, 0)
    if is_last:
        store_results(result, up, operands, given, results, row, block, GATE, OUTPUTS, GROUPS, ROWS)
