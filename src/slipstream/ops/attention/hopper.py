"""FP8 pages for attention on Hopper: TMA copies of numbers and scales, FP8 queries, values in 16 bits.

Keys are multiplied as they lie, by two FP8 matrices whose sum is the queries. MMAs of FP8 sum along rows only, and
values are summed over keys, so the consumer warps widen them to bfloat16: in registers for decode, in shared memory for
prefill.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.attention.cache import FP8, scales_of

HALF_RANGE = gl.constexpr(2.0**60)  # twice: what `widen_values` divides by
MIN_SCALES = gl.constexpr(32)  # per copy: 128 bytes


def describe_numbers(cache: torch.Tensor, block_keys: int) -> Any:
    """TMA descriptor of keys or values, for copies of a page (or of a block of a larger page) of one head."""
    num_pages, page_size, num_kv_heads, dim = cache.shape
    assert cache.dtype is FP8 and cache.stride()[1:] == (dim, page_size * dim, 1), f"{cache.stride()}"
    shape, strides = [num_pages, num_kv_heads * page_size, dim], [cache.stride(0), dim, 1]
    box = [1, min(page_size, block_keys), dim]
    return TensorDescriptor(cache, shape, strides, box, gl.NVMMASharedLayout(min(dim, 128), 8, 3))


def describe_scales(cache: torch.Tensor, block_keys: int) -> Any:
    """TMA descriptor of the scales of keys or values: a row for each page and head, and between pages rows that are
    numbers. Copies go to multiples of 128 bytes; behind the scales of a small page TMA writes zeros."""
    num_pages, page_size, num_kv_heads, dim = cache.shape
    scales, rows_per_page = scales_of(cache), num_kv_heads * (dim // 4 + 1)
    assert num_pages == 1 or scales.stride(0) == rows_per_page * page_size, f"{scales.stride()}"
    rows = (num_pages - 1) * rows_per_page + num_kv_heads
    box = [1, max(MIN_SCALES.value, min(page_size, block_keys))]
    return TensorDescriptor(scales, [rows, page_size], [page_size, 1], box, gl.NVMMASharedLayout(0, 32, 2))


@gluon.jit
def copy_fp8_block(
    source,
    scale_source,
    starts,
    kv_head,
    there,
    block,
    scales,
    first,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Starts the copies of a block of keys or values from these slots, and of their scales to the parts of `scales`
    from `first` on. The barrier `there` counts `fp8_block_bytes`."""
    _copy_numbers(source, starts, kv_head, there, block, DIM, BLOCK_N, PAGE)
    _copy_scales(scale_source, starts, kv_head, there, scales, first, KV_HEADS, DIM, BLOCK_N, PAGE)


@gluon.constexpr_function
def fp8_block_bytes(dim: int, block_keys: int, page_size: int) -> int:
    size = min(block_keys, page_size)
    return block_keys * dim + block_keys // size * max(MIN_SCALES.value, size) * 4


@gluon.jit
def _copy_numbers(source, starts, kv_head, there, block, DIM: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """Starts the copies of one block of keys or values [BLOCK_N, DIM] from these slots."""
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    for part in gl.static_range(BLOCK_N // SIZE):
        where = [starts[part] // PAGE, kv_head * PAGE + starts[part] % PAGE, 0]
        target = block.slice(part * SIZE, SIZE)._reinterpret(source.dtype, [1, SIZE, DIM], source.layout)
        tma.async_copy_global_to_shared(source, where, there, target)


@gluon.jit
def _copy_scales(
    source,
    starts,
    kv_head,
    there,
    scales,  # [parts, 1, MIN_SCALES or more]
    first,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Starts the copies of the scales of a block to the parts from `first` on."""
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    for part in gl.static_range(BLOCK_N // SIZE):
        row = starts[part] // PAGE * (KV_HEADS * (DIM // 4 + 1)) + kv_head
        tma.async_copy_global_to_shared(source, [row, starts[part] % PAGE], there, scales.index(first + part))


@gluon.jit
def load_scales(scales, index, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """The scales [BLOCK_N] of a block, of all parts [blocks, pages, MIN_SCALES or more], for the rows of an MMA."""
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    REGISTERS: gl.constexpr = [8] if BLOCK_N == 64 else [8, 64]
    BY_PAGE: gl.constexpr = scale_layout(SIZE, BLOCK_N, REGISTERS, [0, 0, 1, 2, 4], [16, 32])
    found = scales.index(index).slice(0, SIZE, 1).load(BY_PAGE)
    return gl.convert_layout(gl.reshape(found, [BLOCK_N]), LAYOUT, assert_trivial=True)


@gluon.jit
def split_queries(q):
    """Queries [lanes, dim] as unit * (high + low), with FP8 `high` and `low` and a power of two `unit` for each lane.
    Exact for bfloat16, but for numbers below 2 ** -10 of the lane's largest: an error below 2 ** -16 of it."""
    numbers = q.to(gl.float32)
    largest = gl.max(gl.abs(numbers), 1).to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum(largest >> 23, 8), 254)
    unit = ((exponent - 7) << 23).to(gl.float32, bitcast=True)  # the largest is 128 to 256 of them
    numbers *= gl.expand_dims(((261 - exponent) << 23).to(gl.float32, bitcast=True), 1)
    # rounded to four bits as integers: ptxas 12.8 reads a stale register where FP8 numbers are converted back
    high = ((numbers.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)
    return high.to(gl.float8e4nv), (numbers - high).to(gl.float8e4nv), unit


@gluon.jit
def widen_values(block, OPERAND: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """The numbers of `block` [BLOCK_N, DIM] times 2 ** -120 as bfloat16: its exponent begins with four bits that e4m3
    does not have. Every byte becomes a finite number, also those of earlier rows that are NaN. Returns [DIM, BLOCK_N],
    the left operand of an MMA in registers; its rows are `dims_of_rows`. Pairs of bytes are loaded with their matrix
    transposed, as `ldmatrix` does for numbers of 16 bits only."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(DIM, 16, 2)
    pairs = block._reinterpret(gl.int16, [BLOCK_N, DIM // 2], PAIRS).permute((1, 0)).load(pair_layout(DIM, BLOCK_N))
    even, odd = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c;
        shl.b32 a, $2, 4;
        shl.b32 b, $2, 8;
        and.b32 b, b, 0x80008000;
        lop3.b32 $0, a, 0x07f007f0, b, 0xea;
        shr.u32 c, $2, 4;
        and.b32 b, $2, 0x80008000;
        lop3.b32 $1, c, 0x07f007f0, b, 0xea;
        }""",
        "=&r,=r,r",
        [pairs],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    wide = gl.reshape(gl.join(even, odd), [DIM // 16, 8, BLOCK_N, 2])
    wide = gl.reshape(gl.permute(wide, (0, 3, 1, 2)), [DIM, BLOCK_N])
    return gl.convert_layout(wide, OPERAND, assert_trivial=True)


@gluon.jit
def store_largest(scores, exchange):
    """The first half of the maximum of scores [keys, LANES] of an MMA: stores that of each warp to [4, LANES]."""
    KEYS: gl.constexpr = scores.shape[0]
    LANES: gl.constexpr = scores.shape[1]
    own = gl.permute(gl.reshape(scores, [KEYS // 64, 4, 16, LANES]), (1, 0, 2, 3))
    exchange.store(gl.max(gl.reshape(own, [4, KEYS // 4, LANES]), 1))


@gluon.jit
def load_largest(exchange):
    """The second half: [LANES]."""
    return gl.max(exchange.load(warp_layout(exchange.shape[1])), 0)


@gluon.constexpr_function
def warp_layout(lanes: int) -> Any:
    """Layout [4, lanes]: a thread has the numbers of all warps for its columns of an MMA."""
    registers = [[0, 1], [1, 0], [2, 0]] + [[0, column] for column in (8, 16) if column < lanes]
    threads = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, threads, [[0, 0], [0, 0]], [], [4, lanes])


@gluon.jit
def dims_of_rows(row):
    """The dimensions of the rows of `widen_values`: the two of a pair are 8 rows apart."""
    return row // 16 * 16 + row % 8 * 2 + row // 8 % 2


@gluon.constexpr_function
def pair_layout(dim: int, keys: int) -> Any:
    """Layout [dim / 2, keys] of pairs of numbers, of which a thread has the pairs of an MMA's left operand: 8 pairs are
    16 rows of a warp."""
    registers = [[0, 1], [0, 8]] + [[0, key] for key in (16, 32, 64) if key < keys]
    registers += [[32, 0]] if dim == 128 else []
    threads = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, threads, [[8, 0], [16, 0]], [], [dim // 2, keys])


@gluon.jit
def widen_scaled(numbers, scales):
    """Bytes of e4m3 numbers times bfloat16 scales and 2 ** -120, as `widen_values`."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 c, a, 0x80008000;
        and.b32 d, b, 0x80008000;
        shr.u32 a, a, 4;
        shr.u32 b, b, 4;
        lop3.b32 a, a, 0x07f007f0, c, 0xea;
        lop3.b32 b, b, 0x07f007f0, d, 0xea;
        mul.bf16x2 $0, a, $3;
        mul.bf16x2 $1, b, $4;
        }""",
        "=&r,=&r,r,r,r",
        [numbers, scales],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def plain_scales(scales, STAGES: gl.constexpr):
    """The same scales, [STAGES, parts of a block, keys of a part], for loads."""
    PARTS: gl.constexpr = [STAGES, scales.shape[0] // STAGES, scales.shape[2]]
    return scales._reinterpret(gl.float32, PARTS, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def load_column_scales(scales, index, SCORES: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """The scales [BLOCK_N] of a block of `plain_scales`, for the columns of an MMA."""
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    LAYOUT: gl.constexpr = scale_layout(SIZE, BLOCK_N, [1, 8, 16, 32, 64], [2, 4, 0, 0, 0], [0, 0])
    found = gl.reshape(scales.index(index).slice(0, SIZE, 1).load(LAYOUT), [BLOCK_N])
    return gl.convert_layout(found, gl.SliceLayout(0, SCORES), assert_trivial=True)


@gluon.jit
def widen_block(
    values,
    wide_values,
    start,
    length,
    done,
    HALF: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One half of the values of block `done` times their scales, and 2 ** -60, in bfloat16."""
    v, v_there, v_used, v_scales = values
    wide, wide_there, wide_used = wide_values
    KEYS: gl.constexpr = BLOCK_N // 2
    SIZE: gl.constexpr = KEYS if PAGE > KEYS else PAGE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [512 // DIM, DIM // 16], [4, 1], [1, 0])
    BITS: gl.constexpr = [[16, 32], [0, 0, 0, 1, 2], [4, 8]] if DIM == 128 else [[32], [0, 0, 1, 2, 4], [8, 16]]
    SCALES: gl.constexpr = scale_layout(SIZE, KEYS, BITS[0], BITS[1], BITS[2])
    stage = done % STAGES
    mbarrier.wait(v_there.index(stage), done // STAGES & 1)
    numbers = v.index(stage).slice(HALF * KEYS, KEYS).load(LAYOUT).to(gl.uint8, bitcast=True)
    if PAGE > KEYS:
        loaded = v_scales.index(stage).slice(HALF * KEYS, KEYS, 1)
    else:
        loaded = v_scales.index(stage).slice(HALF * (KEYS // PAGE), KEYS // PAGE).slice(0, PAGE, 1)
    scales = gl.reshape(loaded.load(SCALES), [KEYS])
    scales = gl.convert_layout(scales, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    mbarrier.arrive(v_used.index(stage), count=1)
    key = start + HALF * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    # a page may hold old values, and their scales may be NaN
    scales = gl.where(key < length, scales * HALF_RANGE, 0.0).to(gl.bfloat16)
    found = widen_scaled(numbers, gl.expand_dims(scales, 1))
    mbarrier.wait(wide_used.index(stage), (done // STAGES & 1) ^ 1)
    wide.index(stage).slice(HALF * KEYS, KEYS).store(found)
    fence_async_shared()
    mbarrier.arrive(wide_there.index(stage), count=1)


@gluon.constexpr_function
def scale_layout(size: int, keys: int, registers: list[int], lanes: list[int], warps: list[int]) -> Any:
    """Layout of scales [keys / size, size] of pages, by the keys that the bits of registers, lanes and warps add."""
    bits = ([[key // size, key % size] for key in kind] for kind in (registers, lanes, warps))
    return gl.DistributedLinearLayout(*bits, [], [keys // size, size])


# Shared parts of the Hopper kernels: TMA copies of pages, and masking of data past the end of a row.
#
# The kernels are written in Gluon, in which the warps of a program have different roles: producer warps load keys and
# values as far ahead as the pipeline allows, consumer warps compute. Gluon has no interpreter:
# `tests/ops/test_kernels_compile.py` compiles the kernels on any machine, `pytest -m cuda` runs them.


def describe(cache: torch.Tensor, block_keys: int) -> Any:
    """TMA descriptor of keys or values, for copies of a page (or of a block of a larger page) of one head."""
    num_pages, page_size, num_kv_heads, dim = cache.shape
    assert cache.is_contiguous(), f"pages must be contiguous, their strides are {cache.stride()}"
    box = [min(page_size, block_keys), dim]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)  # the same for both 16-bit dtypes
    return TensorDescriptor.from_tensor(cache.view(num_pages * page_size, num_kv_heads * dim), box, layout)


@gluon.jit
def copy_block(
    source,
    pages,  # page table of the row
    start,
    length,
    kv_head,
    there,
    block,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Starts the copies of the keys or values from `start` on; the barrier `there` counts their bytes."""
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    for part in gl.static_range(BLOCK_N // SIZE):
        where = [_find(pages, start + part * SIZE, length, PAGE), kv_head * DIM]
        tma.async_copy_global_to_shared(source, where, there, block.slice(part * SIZE, SIZE))


@gluon.jit
def find_starts(pages, start, length, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """Slots of the keys from `start` on, one per page: the first half of `copy_block`, for blocks of few pages, since a
    producer warp has few registers."""
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    starts = ()
    for part in gl.static_range(BLOCK_N // SIZE):
        starts = starts + (_find(pages, start + part * SIZE, length, PAGE),)  # type: ignore[assignment]
    return starts


@gluon.jit
def copy_parts(source, starts, kv_head, there, block, DIM: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """The second half of `copy_block`: starts the copies from these slots."""
    SIZE: gl.constexpr = BLOCK_N if PAGE > BLOCK_N else PAGE
    for part in gl.static_range(BLOCK_N // SIZE):
        where = [starts[part], kv_head * DIM]
        tma.async_copy_global_to_shared(source, where, there, block.slice(part * SIZE, SIZE))


@gluon.jit
def _find(pages, key, length, PAGE: gl.constexpr):
    """The slot of a key. Keys up to `length` belong to the row; past it the null page is used, which may hold
    anything."""
    page = gl.load(pages + key // PAGE, mask=key < length, other=0).to(gl.int32)
    return page * PAGE + key % PAGE


@gluon.jit
def clear_past_end(values, num_valid, BY_ROW: gl.constexpr, BLOCK_N: gl.constexpr):
    """Writes zeros past the end of a row: a page may hold old values, and 0 times an old value may be NaN."""
    PIECE: gl.constexpr = 32
    for first in gl.static_range(0, BLOCK_N, PIECE):
        piece = values.slice(first, PIECE)
        values_read = piece.load(BY_ROW)
        valid = first + gl.arange(0, PIECE, gl.SliceLayout(1, BY_ROW)) < num_valid
        piece.store(gl.where(gl.expand_dims(valid, 1), values_read, gl.zeros_like(values_read)))
    fence_async_shared()


# Merges the splits of a row, for decode attention on Hopper.


@gluon.jit
def join_splits(
    out,
    sums,
    stats,
    first,
    num_splits,
    kv_head,
    out_head,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
):
    """Merges all splits of a query and kv head into its output, a few at a time, in key order."""
    LANES: gl.constexpr = triton.next_power_of_2(GROUP)
    # a thread sums all splits of its outputs, so that warps exchange nothing
    SPLITS: gl.constexpr = max(1, min(8, 4096 // (LANES * DIM)))
    WIDTH: gl.constexpr = max(1, min(4, LANES * DIM // 128))  # outputs of a thread side by side
    COLUMNS: gl.constexpr = max(1, min(4, DIM // (32 * WIDTH)))  # warps side by side
    PARTS: gl.constexpr = gl.BlockedLayout([SPLITS, 1, WIDTH], [1, 1, 32], [1, 4 // COLUMNS, COLUMNS], [2, 1, 0])
    EACH: gl.constexpr = gl.SliceLayout(2, PARTS)  # [SPLITS, LANES]
    WHOLE: gl.constexpr = gl.SliceLayout(0, PARTS)  # [LANES, DIM]
    split = gl.expand_dims(gl.arange(0, SPLITS, gl.SliceLayout(1, EACH)), 1)
    lane = gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(0, EACH)), 0)
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WHOLE))
    head = kv_head * GROUP + lane
    top = gl.full([LANES], float("-inf"), gl.float32, gl.SliceLayout(0, EACH))
    total = gl.zeros([LANES], gl.float32, gl.SliceLayout(0, EACH))
    acc = gl.zeros([LANES, DIM], gl.float32, WHOLE)
    for start in range(0, num_splits, SPLITS):
        partial = (first + start + split) * (KV_HEADS * GROUP) + head
        mask = (start + split < num_splits) & (lane < GROUP)
        # bypass L1: other multiprocessors wrote these
        tops = gl.load(stats + partial * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(stats + partial * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        where = sums + gl.expand_dims(partial * DIM, 2) + gl.expand_dims(gl.expand_dims(dim, 0), 0)
        part = gl.load(where, mask=gl.expand_dims(mask, 2), other=0.0, cache_modifier=".cg")
        higher = gl.maximum(top, gl.max(tops, 0))
        # lanes past the group have no maximum
        base = gl.where(higher == float("-inf"), 0.0, higher)
        fade = gl.exp2(top - base)
        weight = gl.exp2(tops - gl.expand_dims(base, 0))
        total = total * fade + gl.sum(totals * weight, 0)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, WHOLE))
        acc = acc * gl.expand_dims(fade, 1) + gl.sum(part * gl.expand_dims(weight, 2), 0)
        top = higher
    total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, WHOLE))
    lane = gl.arange(0, LANES, gl.SliceLayout(1, WHOLE))
    where = out + gl.expand_dims((kv_head * GROUP + lane) * out_head, 1) + gl.expand_dims(dim, 0)
    gl.store(where, (acc / gl.expand_dims(total, 1)).to(out.dtype.element_ty), mask=gl.expand_dims(lane < GROUP, 1))
