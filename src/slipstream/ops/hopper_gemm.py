"""Pieces of the GEMMs in Gluon that multiply tiles of 128 rows x 256 columns: see `gated_gemm_hopper.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

ROWS = gl.constexpr(64)  # per warpgroup
SIZE = gl.constexpr(128)  # columns of each half of a tile
WIDTH = gl.constexpr(64)  # inputs per step: 128 bytes
STAGES = gl.constexpr(4)


@gluon.jit
def multiply_tile(tiles, ahead, done, num_steps, HALF: gl.constexpr, AHEAD: gl.constexpr):
    """A consumer warpgroup: the sums of one half of the rows of a tile, and the number of steps done. The first
    warpgroup lets the second begin after AHEAD steps, if this is not 0."""
    ws, xs, there, used = tiles
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * SIZE, 16])
    acc = gl.zeros([ROWS, 2 * SIZE], gl.float32, SUMS)
    for step in range(num_steps):
        stage = done % STAGES
        mbarrier.wait(there.index(stage), done // STAGES & 1)
        part = xs.index(stage).slice(HALF * ROWS, ROWS)
        acc = warpgroup_mma(part, ws.index(stage).permute((1, 0)), acc, is_async=True)
        # the MMA of this step is in flight, that of the previous step is complete
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if step > 0:
            mbarrier.arrive(used.index((done - 1) % STAGES), count=1)
        if AHEAD > 0 and HALF == 0:  # noqa: SIM102
            if done == AHEAD:
                mbarrier.arrive(ahead, count=1)
        done += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(used.index((done - 1) % STAGES), count=1)
    return acc, done


@gluon.jit
def halves(sums, COLUMNS: gl.constexpr):
    """The first and the last columns of sums [ROWS, 2 * COLUMNS]."""
    return gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, COLUMNS]), (0, 2, 1)))
