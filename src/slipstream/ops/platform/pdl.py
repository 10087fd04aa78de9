"""Programmatic dependent launch (PDL): from Hopper on, a kernel may start while the previous kernel still runs.

The kernel first reads data that no kernel writes, above all weights, then waits until the previous kernel, and with it
every earlier kernel, is complete. Rule: every program of a kernel launched this way waits before it touches other data.

Page tables, tile lists and keys of earlier steps are read early too. So kernels that write page tables or tile lists
never release the next one (`tests/ops/test_attention_tile_list.py`): it starts when they are complete, as does what
follows it.

Weights may be written in place between two steps: kernels without PDL gather a step's inputs, and start when all writes
before them are complete. A script that writes a weight by a kernel and multiplies by it at once must synchronise first.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_TOKENS = 256
"""Largest step whose kernels use PDL. At 256 rows PDL saves 7 us per layer of the 0.6B, which runs our GEMMs there, and
nothing for the 8B, which runs cuBLAS between our kernels."""


MAX_PROGRAMS = 32768
"""Largest grid. Each program waits, which costs more than an early start gains if there are very many: a GEMV for the
LM head of the 8B, 75,968 programs, took 294 us behind the layers, and 270 without PDL (H200)."""


def dependent(device: torch.device, num_tokens: int, num_programs: int = 1) -> dict[str, bool]:
    """Launch arguments: DEPENDENT for the kernel, launch_pdl for the driver."""
    enabled = num_tokens <= MAX_TOKENS and num_programs <= MAX_PROGRAMS and _supports_pdl(device)
    return {"DEPENDENT": enabled, "launch_pdl": enabled}


@cache
def _supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def release_next(DEPENDENT: tl.constexpr) -> None:
    """Lets the next kernel start once all programs of this one have started."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr) -> None:
    if DEPENDENT:
        gdc_wait()


# Barriers in shared memory of the kernels in Gluon: loads by TMA and warps report their arrival at them.


@gluon.jit
def make_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """One barrier per stage, complete after COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=COUNT)
    return barriers


# Pieces of the GEMMs in Gluon that multiply tiles of 128 rows x 256 columns: see `gated_gemm_hopper.py`.

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
