"""One kernel for the four GEMMs between two attentions, FP8 weights and a single row: o, gate and up, down, next qkv.
After the last attention there are three, and the norm of the hidden states. That is the same binary, since the code of
a kernel that runs once per step is in no cache.

Each multiprocessor has one program for the whole kernel. Its producer warp streams the program's weights of all four
GEMMs without a pause, since weights depend on nothing; the consumer warps wait between two GEMMs until all programs
have stored their results. The weights in flight and in shared memory cover that time. Kernels in a sequence cannot do
this: the shared memory of a program is free for the next kernel only when the program ends.

Each program computes what lies between two GEMMs for the whole row: it adds partial sums and residual, and computes the
norm and the FP8 inputs. All programs must run at once, or none would pass a barrier: see `layer.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
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

from slipstream.ops.gemm.linear.epilogue import GATES
from slipstream.ops.gemm.linear.streaming_kernel import FETCH_REGISTERS, MAX_FP8
from slipstream.ops.gemm.quantized import matrix
from slipstream.ops.gemm.quantized.matrix import SPLITS, LayerGemms
from slipstream.ops.platform.pdl import dependent, make_barriers, release_next, wait_for_previous

PROGRAMS = gl.constexpr(matrix.PROGRAMS)  # a power of two: the counter of the barriers may overflow
OUTPUTS = gl.constexpr(64)  # of a block
TILE = gl.constexpr(128)  # inputs of a TMA copy
COPIES = gl.constexpr(2)  # TMA copies per pipeline stage
GROUP = gl.constexpr(8)  # tiles of inputs that share a matrix of 8 rows in shared memory


# grid: (PROGRAMS,)
@gluon.jit(do_not_specialize=["next_units"])
def layer_kernel(
    x,  # [O_IN] bfloat16
    residual,  # [HIDDEN] bfloat16
    o_weight,  # descriptors of FP8 weights, boxes of 64 x 128
    gate_weight,  # [FEED / 8, 2, 8, HIDDEN], boxes of 4 x 2 x 8 x 128: 8 gate rows, then their up rows
    down_weight,
    next_weight,  # without a next qkv any of these
    o_scale,  # [out] float32
    gate_scale,
    down_scale,
    next_scale,
    feed_norm,  # [HIDDEN] bfloat16
    next_norm,
    feed_eps,
    next_eps,
    o_parts,  # [O_SPLITS, HIDDEN] float32, memory for partial sums
    gated,  # [FEED] bfloat16, memory
    down_parts,  # [DOWN_SPLITS, HIDDEN] float32, memory
    total,  # [HIDDEN] bfloat16, the result before the norm
    out,  # [64 * next_units] bfloat16, the result; without a next qkv [HIDDEN]
    arrived,  # int32, a multiple of PROGRAMS between kernels
    next_units,  # blocks of the next qkv; 0: there is none
    O_IN: gl.constexpr,
    HIDDEN: gl.constexpr,
    FEED: gl.constexpr,
    O_SPLITS: gl.constexpr,
    DOWN_SPLITS: gl.constexpr,
    GATE: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    release_next(DEPENDENT)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * COPIES, OUTPUTS, TILE], SHARED)
    xs = gl.allocate_shared_memory(gl.float8e4nv, [GROUP, GROUP, TILE], SHARED)
    there, used = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    fence_async_shared()
    SIZES: gl.constexpr = (O_IN, HIDDEN, FEED, O_SPLITS, DOWN_SPLITS, GATE, STAGES)
    ring = (ws, there, used)
    weights = (o_weight, gate_weight, down_weight, next_weight)
    scales = (o_scale, gate_scale, down_scale, next_scale)
    norms = (feed_norm, feed_eps, next_norm, next_eps)
    memory = (o_parts, gated, down_parts, total, out, arrived)
    gl.warp_specialize(
        [
            (_compute, (x, residual, xs, ring, scales, norms, memory, next_units, SIZES, DEPENDENT)),
            (_fetch, (ring, weights, next_units, SIZES)),
        ],
        [1],
        [FETCH_REGISTERS],
    )


@gluon.constexpr_function
def num_steps(num_in, splits):
    """Pipeline stages of a block's part of the inputs."""
    return num_in // splits // (TILE.value * COPIES.value)


@gluon.constexpr_function
def num_units(num_out, splits):
    """Blocks of outputs times parts of the inputs. A program has every PROGRAMS-th."""
    return num_out // OUTPUTS.value * splits


@gluon.jit
def _own(units):
    """How many of the units this program has."""
    return (units - gl.program_id(0) + PROGRAMS - 1) // PROGRAMS


@gluon.jit
def _fetch(ring, weights, next_units, SIZES: gl.constexpr):
    """The producer warp: the weights of all GEMMs, in the order of `_compute`."""
    O_IN: gl.constexpr = SIZES[0]
    HIDDEN: gl.constexpr = SIZES[1]
    FEED: gl.constexpr = SIZES[2]
    O_SPLITS: gl.constexpr = SIZES[3]
    DOWN_SPLITS: gl.constexpr = SIZES[4]
    STAGES: gl.constexpr = SIZES[6]
    first = _fetch_gemm(ring, weights[0], 0, num_units(HIDDEN, O_SPLITS), O_IN, O_SPLITS, False, STAGES)
    first = _fetch_gemm(ring, weights[1], first, num_units(2 * FEED, 1), HIDDEN, 1, True, STAGES)
    first = _fetch_gemm(ring, weights[2], first, num_units(HIDDEN, DOWN_SPLITS), FEED, DOWN_SPLITS, False, STAGES)
    _fetch_gemm(ring, weights[3], first, next_units, HIDDEN, 1, False, STAGES)


@gluon.jit
def _fetch_gemm(
    ring,
    weight,
    first,
    units,
    NUM_IN: gl.constexpr,
    SPLITS: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copies the program's weights of one GEMM, from the step `first` on; returns the step after the last."""
    ws, there, used = ring
    STEPS: gl.constexpr = num_steps(NUM_IN, SPLITS)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 8, 4)
    count = _own(units) * STEPS
    for index in range(count):
        step = first + index
        stage = step % STAGES
        unit = gl.program_id(0) + index // STEPS * PROGRAMS
        block = unit // SPLITS
        begin = (unit % SPLITS * STEPS + index % STEPS) * COPIES
        mbarrier.wait(used.index(stage), (step // STAGES & 1) ^ 1)
        bar = there.index(stage)
        mbarrier.expect(bar, COPIES * OUTPUTS * TILE)
        for copy in gl.static_range(COPIES):
            target = ws.index(stage * COPIES + copy)
            k = (begin + copy) * TILE
            if PAIRED:
                target = target._reinterpret(gl.float8e4nv, [OUTPUTS // 16, 2, 8, TILE], BOX)
                tma.async_copy_global_to_shared(weight, [block * (OUTPUTS // 16), 0, 0, k], bar, target)
            else:
                tma.async_copy_global_to_shared(weight, [block * OUTPUTS, k], bar, target)
    return first + count


@gluon.jit
def _compute(x, residual, xs, ring, scales, norms, memory, next_units, SIZES: gl.constexpr, DEPENDENT: gl.constexpr):
    """The consumer warps."""
    O_IN: gl.constexpr = SIZES[0]
    HIDDEN: gl.constexpr = SIZES[1]
    FEED: gl.constexpr = SIZES[2]
    O_SPLITS: gl.constexpr = SIZES[3]
    DOWN_SPLITS: gl.constexpr = SIZES[4]
    GATE: gl.constexpr = SIZES[5]
    STAGES: gl.constexpr = SIZES[6]
    feed_norm, feed_eps, next_norm, next_eps = norms
    o_parts, gated, down_parts, total, out, arrived = memory
    weights = _load_row(feed_norm, 0, HIDDEN)
    wait_for_previous(DEPENDENT)
    kept = _load_row(residual, 0, HIDDEN)
    scale = _quantize_plain(x, xs, O_IN, O_SPLITS)
    units = num_units(HIDDEN, O_SPLITS)
    first = _multiply(ring, xs, scales[0], scale, o_parts, 0, units, O_IN, HIDDEN, O_SPLITS, 0, STAGES)
    _wait_for_all(arrived)
    kept = _add_parts(o_parts, kept, HIDDEN, O_SPLITS)
    scale = _quantize_normed(kept, weights, feed_eps, xs, HIDDEN)
    units = num_units(2 * FEED, 1)
    first = _multiply(ring, xs, scales[1], scale, gated, first, units, HIDDEN, 2 * FEED, 1, GATE, STAGES)
    weights = _load_row(next_norm, 0, HIDDEN)
    _wait_for_all(arrived)
    scale = _quantize_plain(gated, xs, FEED, DOWN_SPLITS)
    units = num_units(HIDDEN, DOWN_SPLITS)
    first = _multiply(ring, xs, scales[2], scale, down_parts, first, units, FEED, HIDDEN, DOWN_SPLITS, 0, STAGES)
    before = _arrive(arrived)
    if gl.program_id(0) < gl.maximum(next_units, 1):
        _wait_for(arrived, before)
        kept = _add_parts(down_parts, kept, HIDDEN, DOWN_SPLITS)
        if gl.program_id(0) == 0:
            gl.store(total + _offsets(HIDDEN), kept)
        if next_units > 0:
            scale = _quantize_normed(kept, weights, next_eps, xs, HIDDEN)
            _multiply(ring, xs, scales[3], scale, out, first, next_units, HIDDEN, 0, 1, 0, STAGES)
        else:
            _store_normed(kept, weights, next_eps, out, HIDDEN)


@gluon.jit
def _offsets(NUM: gl.constexpr):
    """The numbers 0 to NUM - 1, padded, as [groups, tiles of a group, inputs of a tile]."""
    SHAPE: gl.constexpr = [triton.next_power_of_2(NUM // (GROUP * TILE)), GROUP, TILE]
    BY_GROUP: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, BY_GROUP)
    group = gl.arange(0, SHAPE[0], gl.SliceLayout(1, ROW)) * (GROUP * TILE)
    column = gl.arange(0, TILE, gl.SliceLayout(0, ROW))
    flat = gl.expand_dims(gl.expand_dims(group, 1) + gl.expand_dims(column, 0), 1)
    tile = gl.arange(0, GROUP, gl.SliceLayout(0, gl.SliceLayout(2, BY_GROUP))) * TILE
    return flat + gl.expand_dims(gl.expand_dims(tile, 0), 2)


@gluon.jit
def _load_row(row, first, NUM: gl.constexpr):
    """NUM numbers from `first` on, padded with zeros, as `_offsets`."""
    offsets = _offsets(NUM)
    return gl.load(row + first + offsets, mask=offsets < NUM, other=0.0)


@gluon.jit
def _flat(value):
    return gl.reshape(value, [value.numel])


@gluon.jit
def _store_inputs(value, scale, xs):
    """Writes a padded row as FP8 for the MMAs of all warps: tile t of a group is row t of the group's matrix."""
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    quantized = (value * (1 / scale)).to(gl.float8e4nv)
    xs._reinterpret(gl.float8e4nv, [value.shape[0], GROUP, TILE], BOX).store(quantized)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _quantize_plain(x, xs, NUM_IN: gl.constexpr, SPLITS: gl.constexpr):
    """The program's part of the inputs, for all of its units; returns the scale of the row."""
    whole = _load_row(x, 0, NUM_IN)
    own = _load_row(x, gl.program_id(0) % SPLITS * (NUM_IN // SPLITS), NUM_IN // SPLITS).to(gl.float32)
    scale = gl.maximum(gl.max(_flat(gl.abs(whole.to(gl.float32))), 0) / MAX_FP8, 1e-12)
    _store_inputs(own, scale, xs)
    return scale


@gluon.jit
def _add_parts(parts, residual, NUM: gl.constexpr, SPLITS: gl.constexpr):
    """residual + the sum of all parts."""
    added = _load_row(parts, 0, NUM)
    for split in gl.static_range(1, SPLITS):
        added += _load_row(parts, split * NUM, NUM)
    return (residual.to(gl.float32) + added).to(gl.bfloat16)


@gluon.jit
def _norm_factor(value, eps, NUM: gl.constexpr):
    return gl.rsqrt(gl.sum(_flat(value * value), 0) / NUM + eps)


@gluon.jit
def _quantize_normed(total, weights, eps, xs, NUM: gl.constexpr):
    """The norm of the total as inputs; returns their scale times the factor of the norm."""
    value = total.to(gl.float32)
    weighted = (value * weights.to(gl.float32)).to(gl.bfloat16).to(gl.float32)
    scale = gl.maximum(gl.max(_flat(gl.abs(weighted)), 0) / MAX_FP8, 1e-12)
    _store_inputs(weighted, scale, xs)
    return scale * _norm_factor(value, eps, NUM)


@gluon.jit
def _store_normed(total, weights, eps, out, NUM: gl.constexpr):
    """As the kernel of `ops/elementwise/norm_triton.py`."""
    value = total.to(gl.float32)
    normed = value * _norm_factor(value, eps, NUM) * weights.to(gl.float32)
    gl.store(out + _offsets(NUM), normed.to(gl.bfloat16))


@gluon.jit
def _multiply(
    ring,
    xs,
    weight_scale,
    scale,
    out,  # [SPLITS, NUM_OUT] float32 or, without splits, bfloat16; gated: [NUM_OUT / 2]
    first,
    units,
    NUM_IN: gl.constexpr,
    NUM_OUT: gl.constexpr,  # for splits and a gate
    SPLITS: gl.constexpr,
    GATE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The program's units of one GEMM, from the step `first` on; returns the step after the last.

    A matrix of inputs has 8 tiles as its rows. An MMA multiplies a tile of weights with all of them, and only the
    column of its own tile counts: the sums of the 8 tiles of a group are apart."""
    STEPS: gl.constexpr = num_steps(NUM_IN, SPLITS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    LANES: gl.constexpr = gl.SliceLayout(1, SUMS)
    used = ring[2]
    count = _own(units)
    tile = gl.expand_dims(gl.arange(0, GROUP, gl.SliceLayout(0, SUMS)), 0)
    lane = gl.arange(0, OUTPUTS, LANES)
    for index in range(count):
        unit = gl.program_id(0) + index * PROGRAMS
        block = unit // SPLITS
        if GATE:
            source = block * (OUTPUTS // 2) + lane // 16 * 8 + lane % 8 + lane // 8 % 2 * (NUM_OUT // 2)
        else:
            source = block * OUTPUTS + lane
        factor = gl.load(weight_scale + source)
        sums0 = gl.zeros([OUTPUTS, GROUP], gl.float32, SUMS)
        sums1, sums2, sums3, sums4, sums5, sums6, sums7 = sums0, sums0, sums0, sums0, sums0, sums0, sums0
        for group in range(STEPS // 4):
            step = first + index * STEPS + group * 4
            inputs = xs.index(group).permute((1, 0))
            sums0, sums1 = _start(ring, step, inputs, sums0, sums1, STAGES)
            sums2, sums3 = _start(ring, step + 1, inputs, sums2, sums3, STAGES)
            sums0, sums1 = warpgroup_mma_wait(2, deps=(sums0, sums1))
            mbarrier.arrive(used.index(step % STAGES), count=1)
            sums4, sums5 = _start(ring, step + 2, inputs, sums4, sums5, STAGES)
            sums2, sums3 = warpgroup_mma_wait(2, deps=(sums2, sums3))
            mbarrier.arrive(used.index((step + 1) % STAGES), count=1)
            sums6, sums7 = _start(ring, step + 3, inputs, sums6, sums7, STAGES)
            sums4, sums5 = warpgroup_mma_wait(2, deps=(sums4, sums5))
            mbarrier.arrive(used.index((step + 2) % STAGES), count=1)
            sums6, sums7 = warpgroup_mma_wait(0, deps=(sums6, sums7))
            mbarrier.arrive(used.index((step + 3) % STAGES), count=1)
        low = gl.where(tile < 2, gl.where(tile == 0, sums0, sums1), gl.where(tile == 2, sums2, sums3))
        high = gl.where(tile < 6, gl.where(tile == 4, sums4, sums5), gl.where(tile == 6, sums6, sums7))
        result = gl.sum(gl.where(tile < 4, low, high), 1) * factor * scale
        if GATE:
            pairs = gl.permute(gl.reshape(result, [OUTPUTS // 16, 2, 8]), (0, 2, 1))
            gate, up = gl.split(pairs)
            slope = gate
            if GATE == 2:
                # (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
                slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            product = gl.reshape(gate / (1.0 + gl.exp(-slope)) * up, [OUTPUTS // 2])
            own = gl.arange(0, OUTPUTS // 2, product.type.layout)
            gl.store(out + block * (OUTPUTS // 2) + own, product.to(out.dtype.element_ty))
        else:
            gl.store(out + unit % SPLITS * NUM_OUT + source, result.to(out.dtype.element_ty))
    return first + count * STEPS


@gluon.jit
def _start(ring, step, inputs, one, other, STAGES: gl.constexpr):
    """Starts the MMAs of a pipeline stage."""
    ws, there, used = ring
    stage = step % STAGES
    mbarrier.wait(there.index(stage), step // STAGES & 1)
    one = warpgroup_mma(ws.index(stage * COPIES), inputs, one, is_async=True)
    other = warpgroup_mma(ws.index(stage * COPIES + 1), inputs, other, is_async=True)
    return one, other


@gluon.jit
def _wait_for_all(arrived):
    """A barrier of all programs: what they stored before it can be read after it."""
    _wait_for(arrived, _arrive(arrived))


@gluon.jit
def _arrive(arrived):
    """Counts this program; returns the count before."""
    gl.thread_barrier()  # all threads have stored
    return gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def _wait_for(arrived, before):
    """Waits for the programs that arrive after `before`. The counter only increases; it is compared by its distance, so
    that it may overflow."""
    goal = (before & -PROGRAMS) + PROGRAMS
    gl.inline_asm_elementwise(
        """{
        .reg .pred waits;
        .reg .b32 left;
        again:
        ld.acquire.gpu.global.b32 left, [$1];
        sub.s32 left, left, $2;
        setp.lt.s32 waits, left, 0;
        @waits bra again;
        mov.b32 $0, left;
        }""",
        "=r,l,r",
        [arrived.to(gl.int64), goal],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


# Launches `layer_kernel.py`: the GEMMs from one attention to the next with FP8 weights, for a single row.

STAGES = 13  # of 16 KB


def launch_layer(
    x: torch.Tensor,  # [1, in]
    residual: torch.Tensor,  # [1, hidden]
    gemms: LayerGemms,
    gate: str,
    arrived: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the next qkv [1, out], or without one the normed hidden states [1, hidden]; and the sum with the
    residual before the norm [1, hidden]."""
    o, gate_up, down, next_qkv = gemms[:4]
    hidden, feed = len(o.values), len(gate_up.values) // 2
    num_out, next_units, next_weight = hidden, 0, down
    if next_qkv is not None:
        num_out, next_weight = len(next_qkv.values), next_qkv
        next_units = num_out // OUTPUTS.value
    memory = torch.empty(2 * SPLITS * hidden + feed // 2, dtype=torch.float32, device=x.device)
    o_parts, down_parts, gated = memory.split([SPLITS * hidden, SPLITS * hidden, feed // 2])
    total = torch.empty_like(residual)
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    layer_kernel[(matrix.PROGRAMS,)](
        x,
        residual,
        _describe(o.values),
        _describe_pairs(gate_up.values),
        _describe(down.values),
        _describe(next_weight.values),
        o.scale,
        gate_up.scale,
        down.scale,
        next_weight.scale,
        gemms.feed_norm,
        gemms.next_norm,
        gemms.feed_eps,
        gemms.next_eps,
        o_parts,
        gated.view(torch.bfloat16),
        down_parts,
        total,
        out,
        arrived,
        next_units,
        O_IN=o.num_columns,
        HIDDEN=hidden,
        FEED=feed,
        O_SPLITS=SPLITS,
        DOWN_SPLITS=SPLITS,
        GATE=GATES[gate],
        STAGES=STAGES,
        num_warps=4,
        maxnreg=168,
        **dependent(x.device, 1),
    )
    return out, total


def _describe(values: torch.Tensor) -> Any:
    box = [OUTPUTS.value, TILE.value]
    return TensorDescriptor.from_tensor(values, box, gl.NVMMASharedLayout(128, 8, 2))


def _describe_pairs(values: torch.Tensor) -> Any:
    """[out / 8, gate and up, 8, in]"""
    rows, columns = values.shape
    shape, strides = [rows // 16, 2, 8, columns], [8 * columns, rows // 2 * columns, columns, 1]
    return TensorDescriptor(
        values, shape, strides, [OUTPUTS.value // 16, 2, 8, TILE.value], gl.NVMMASharedLayout(128, 8, 4)
    )
