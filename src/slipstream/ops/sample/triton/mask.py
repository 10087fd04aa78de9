"""Masks of tokens: fetching them from the host, applying them to logits in place, or while a kernel reads logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # logits
_FETCHED = 1024  # words


def mask_bits_(logits: torch.Tensor, bits: torch.Tensor, entries: torch.Tensor) -> None:
    size = logits.shape[1]
    assert logits.stride(1) == 1 and bits.is_contiguous() and bits.dtype == torch.int32 and bits.shape[1] * 32 >= size
    grid = (triton.cdiv(size, _BLOCK), len(entries))
    _mask_bits_kernel[grid](logits, bits, entries, logits.stride(0), bits.shape[1], size, BLOCK=_BLOCK)


# grid: (blocks, rows)
@triton.jit
def _mask_bits_kernel(logits, bits, entries, stride, num_words, size, BLOCK: tl.constexpr):
    """Blocks without a forbidden token are skipped, and blocks without an allowed one are not read. The others are read
    and written as a whole: vector stores are faster than single ones under a mask."""
    row = tl.program_id(1).to(tl.int64)
    entry = tl.load(entries + row).to(tl.int64)
    first = tl.program_id(0) * (BLOCK // 32)
    index = first + tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    token = index[:, None] * 32 + bit[None, :]
    where = logits + row * stride + token
    if entry >= 0:
        words = tl.load(bits + entry * num_words + index, mask=index < num_words, other=-1)
        if tl.max((words != -1).to(tl.int32), 0) > 0:
            x = tl.full([BLOCK // 32, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
            if tl.max((words != 0).to(tl.int32), 0) > 0:
                x = tl.load(where, mask=token < size, other=0.0)
                x = tl.where(((words[:, None] >> bit[None, :]) & 1) != 0, x, float("-inf"))
            tl.store(where, x, mask=token < size)
    elif entry < -1:
        tl.store(where, float("-inf"), mask=(token < size) & (token != -2 - entry))


@triton.jit
def find_mask(row, bits, mask_entries, mask_index, num_words):
    """The entry of a row's mask, and its bits."""
    entry = tl.load(mask_entries + tl.load(mask_index + row)).to(tl.int64)
    return entry, bits + tl.maximum(entry, 0) * num_words


@triton.jit
def allows_any(bits, entry, start, num_words, PART: tl.constexpr):
    """Whether a mask allows one of the tokens [start, start + PART). `bits`: of the mask, if `entry` >= 0."""
    word = start // 32 + tl.arange(0, PART // 32)
    words = tl.load(bits + word, mask=(word < num_words) & (entry >= 0), other=0)
    only = -2 - entry
    is_here = (entry == -1) | ((only >= start) & (only < start + PART))
    return is_here | (tl.max((words != 0).to(tl.int32), 0) > 0)


@triton.jit
def is_allowed(bits, entry, token, size):
    """Whether a mask allows each token."""
    words = tl.load(bits + token // 32, mask=(token < size) & (entry >= 0), other=0)
    return (((words >> (token % 32)) & 1) != 0) | (token == -2 - entry) | (entry == -1)


def fetch_masks_(
    table: torch.Tensor,
    bits: torch.Tensor,
    targets: torch.Tensor,
    entries: torch.Tensor,
    host_entries: torch.Tensor,
) -> None:
    """The kernel reads pinned host memory: only masks with a target pass the bus."""
    if table.is_cuda and not bits.is_pinned():
        bits, targets, host_entries = (each.to(table.device) for each in (bits, targets, host_entries))
    num_masks, num_words = bits.shape
    assert table.is_contiguous() and bits.is_contiguous() and table.shape[1] == num_words
    assert entries.is_contiguous() and entries.shape == host_entries.shape
    _fetch_kernel[(triton.cdiv(num_words, _FETCHED), num_masks + 1)](
        table, bits, targets, entries, host_entries, num_words, num_masks, len(entries), BLOCK=_FETCHED
    )


# grid: (blocks of words, masks and one for the entries)
@triton.jit(do_not_specialize=["num_masks", "num_entries"])
def _fetch_kernel(table, bits, targets, entries, host_entries, num_words, num_masks, num_entries, BLOCK: tl.constexpr):
    mask = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if mask == num_masks:
        for start in range(0, num_entries, tl.num_programs(0) * BLOCK):
            index = start + block
            tl.store(entries + index, tl.load(host_entries + index, mask=index < num_entries), mask=index < num_entries)
    else:
        target = tl.load(targets + mask).to(tl.int64)
        if target >= 0:
            words = tl.load(bits + mask * num_words + block, mask=block < num_words)
            tl.store(table + target * num_words + block, words, mask=block < num_words)
