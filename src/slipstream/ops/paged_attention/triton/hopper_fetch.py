"""The producer warp of decode attention on Hopper: loads the keys and values of a program's share, in order.

It runs as far ahead of the warps that compute (`hopper_decode.py`) as there are stages. Keys that existed before the
step are loaded while the previous kernels still compute the newest ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from slipstream.ops.paged_attention.single_list import SINGLE_RECORD
from slipstream.ops.paged_attention.triton.hopper import copy_parts, find_starts
from slipstream.ops.paged_attention.triton.hopper_fp8 import copy_fp8_block, fp8_block_bytes
from slipstream.ops.paged_attention.triton.split_schedule import read_single, splits_of_program
from slipstream.ops.pdl import wait_for_previous


@gluon.jit
def fetch_blocks(
    sources,
    blocks,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """The work of the warp. `sources`: what is loaded, `blocks`: the stages and their barriers."""
    keys, values, key_scales, value_scales, table, table_stride, singles, shares = sources
    k, v, there, used, scales = blocks
    kv_head, first, first_split, last, last_split, end = splits_of_program(shares, KV_HEADS)
    done = 0
    for single in range(first, end):
        row, token, begin, size, num_splits, first_partial, length, count, split, stop = read_single(
            singles, single, first, first_split, last, last_split
        )
        pages = table + row * table_stride
        settled = gl.load(singles + gl.cast(single, gl.int64) * SINGLE_RECORD + 7)
        first_key = first_block(begin + split * size, length, count, QUERIES, BLOCK_N, WINDOW)
        if key_scales is not None:
            following = find_starts(pages, first_key, length, BLOCK_N, PAGE)
        for start in range(first_key, gl.minimum(begin + stop * size, length), BLOCK_N):
            # page lookup before the wait for a free stage; for FP8, whose blocks are smaller, a block before
            if key_scales is not None:
                starts = following
                following = find_starts(pages, start + BLOCK_N, length, BLOCK_N, PAGE)
            else:
                starts = find_starts(pages, start, length, BLOCK_N, PAGE)
            if start + BLOCK_N > settled:
                wait_for_previous(DEPENDENT)
            stage = done % STAGES
            bar = there.index(stage)
            mbarrier.wait(used.index(stage), (done // STAGES & 1) ^ 1)
            if key_scales is not None:
                PARTS: gl.constexpr = scales.shape[0] // (2 * STAGES)
                mbarrier.expect(bar, 2 * fp8_block_bytes(DIM, BLOCK_N, PAGE))
                part = 2 * stage * PARTS
                copy_fp8_block(
                    keys, key_scales, starts, kv_head, bar, k.index(stage), scales, part, KV_HEADS, DIM, BLOCK_N, PAGE
                )
                part += PARTS
                copy_fp8_block(
                    values,
                    value_scales,
                    starts,
                    kv_head,
                    bar,
                    v.index(stage),
                    scales,
                    part,
                    KV_HEADS,
                    DIM,
                    BLOCK_N,
                    PAGE,
                )
            else:
                mbarrier.expect(bar, 2 * BLOCK_N * DIM * 2)
                copy_parts(keys, starts, kv_head, bar, k.index(stage), DIM, BLOCK_N, PAGE)
                copy_parts(values, starts, kv_head, bar, v.index(stage), DIM, BLOCK_N, PAGE)
            done += 1


@gluon.jit
def first_block(key, length, count, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """The first block from `key` on that a query sees."""
    if WINDOW:
        if QUERIES == 1:
            count = 1
        key = gl.maximum(key, gl.maximum(length - count + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N)
    return key
