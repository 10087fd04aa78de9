"""Shared parts of the Hopper kernels: TMA copies of pages, and masking of data past the end of a row.

The kernels are written in Gluon, in which the warps of a program have different roles: producer warps load keys and
values as far ahead as the pipeline allows, consumer warps compute. Gluon has no interpreter:
`tests/ops/test_kernels_compile.py` compiles the kernels on any machine, `pytest -m cuda` runs them.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


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
        held = piece.load(BY_ROW)
        valid = first + gl.arange(0, PIECE, gl.SliceLayout(1, BY_ROW)) < num_valid
        piece.store(gl.where(gl.expand_dims(valid, 1), held, gl.zeros_like(held)))
    fence_async_shared()
