"""Argmax, and sampling with limits: one kernel finds the best token per chunk of a row, a second one the best chunk.
`gumbel_max.py` samples without limits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.sample.reference import DRAW, Choice, DrawTables, Penalty, TokenMask
from slipstream.ops.sample.triton.best_part import best_parts
from slipstream.ops.sample.triton.floor import SPAN, find_floor_and_peaks
from slipstream.ops.sample.triton.gumbel_max import draw_unlimited
from slipstream.ops.sample.triton.mask import allows_any, find_mask, is_allowed, mask_bits_
from slipstream.ops.sample.triton.noise import exponential_at, halves, step_keys
from slipstream.ops.sample.triton.penalty import find_penalty, num_earlier, with_penalty

_CHUNK = 4096
_DRAW_CHUNK = 2048  # noise takes more registers per token
# with top-k, top-p or min-p most parts of a chunk hold no candidate
_CUT_CHUNK = 1024
_PART = 256


def argmax_rows(logits: torch.Tensor, penalty: Penalty | None = None, mask: TokenMask | None = None) -> Choice:
    return _choose(logits, None, None, None, None, penalty, mask)


def draw(
    logits: torch.Tensor,
    keys: torch.Tensor,  # [R] int64
    random: torch.Tensor | None = None,  # [R] bool
    temperature: torch.Tensor | None = None,  # [R]
    limits: torch.Tensor | None = None,  # [R, 3]
    penalty: Penalty | None = None,
    mask: TokenMask | None = None,
) -> Choice:
    if limits is None:
        return draw_unlimited(logits, keys, random, temperature, penalty, mask)
    return _choose(logits, keys, random, temperature, limits, penalty, mask)


def draw_by_row(
    logits: torch.Tensor,
    rows: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
    tables: DrawTables,
    penalty: Penalty | None = None,
    mask: TokenMask | None = None,
) -> Choice:
    if tables.limits is None:
        return draw_unlimited(
            logits, tables.keys, tables.is_random, tables.temperatures, penalty, mask, rows=rows, positions=positions
        )
    keys = step_keys(tables.keys.index_select(0, rows), positions, DRAW)
    random, temperature = tables.is_random.index_select(0, rows), tables.temperatures.index_select(0, rows)
    return _choose(logits, keys, random, temperature, tables.limits.index_select(0, rows), penalty, mask)


def _choose(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    random: torch.Tensor | None,
    temperature: torch.Tensor | None,
    limits: torch.Tensor | None,
    penalty: Penalty | None,
    mask: TokenMask | None,
) -> Choice:
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, "logits must be contiguous along the vocabulary"
    floor = peaks = None
    chunk = part = _CHUNK if keys is None else _DRAW_CHUNK
    num_warps = 4
    if limits is not None:
        if mask is not None:  # the floor is found in several passes
            logits = logits.clone()
            mask_bits_(logits, mask.bits, mask.entries.index_select(0, mask.index))
            mask = None
        floor, peaks = find_floor_and_peaks(logits, limits, temperature, penalty)
        chunk, part, num_warps = _CUT_CHUNK, _PART, 1
    num_chunks = triton.cdiv(size, chunk)
    tops = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    chunk_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    _chunk_kernel[(num_chunks, num_rows)](
        logits,
        keys,
        None if random is None else random.view(torch.uint8),
        temperature,
        floor,
        peaks,
        *(penalty or (None,) * 5),
        *(mask or (None,) * 3),
        tops,
        chunk_ids,
        logits.stride(0),
        size,
        0 if mask is None else mask.bits.shape[1],
        EARLIER=num_earlier(penalty),
        CHUNK=chunk,
        PART=part,
        SPAN=SPAN,
        num_warps=num_warps,
    )
    return best_parts(tops, chunk_ids, num_chunks)


# grid: (chunks, rows)
@triton.jit(do_not_specialize_on_alignment=["entries"])
def _chunk_kernel(
    logits,
    keys,
    random,
    temperature,
    floor,
    peaks,
    counts,
    seen,
    entries,
    values,
    earlier,
    bits,
    mask_entries,
    mask_index,
    tops,
    chunk_ids,
    stride,
    size,
    num_words,
    EARLIER: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    SPAN: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    scale: tl.constexpr = None
    limit: tl.constexpr = None
    noisy = True
    penalty: tl.constexpr = None
    if entries is not None:
        penalty = find_penalty(row, size, counts, seen, entries, values, earlier, EARLIER)
    mask_entry: tl.constexpr = None
    if bits is not None:
        mask_entry, bits = find_mask(row, bits, mask_entries, mask_index, num_words)
    if temperature is not None:
        scale = tl.load(temperature + row)
    if floor is not None:
        limit = tl.load(floor + row)
        peaks += row * tl.cdiv(size, SPAN)
    if random is not None:
        noisy = tl.load(random + row) != 0
    best = tl.full([], float("-inf"), tl.float32)
    found = chunk * CHUNK
    has_nan = tl.full([], 0, tl.int32)
    for offset in range(0, CHUNK, PART):
        start = chunk * CHUNK + offset
        stays = True
        if floor is not None:  # noqa: SIM102 (a compile-time condition)
            if limit > float("-inf"):
                span = start // SPAN + tl.arange(0, PART // SPAN)
                peak = tl.load(peaks + span, mask=span * SPAN < size, other=float("-inf"))
                stays = tl.max(peak, 0) >= limit
        if bits is not None:
            stays = allows_any(bits, mask_entry, start, num_words, PART)
        if stays:
            index = start + tl.arange(0, PART)
            score = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf")).to(tl.float32)
            if bits is not None:
                score = tl.where(is_allowed(bits, mask_entry, index, size), score, float("-inf"))
            score = with_penalty(score, index, True, size, penalty, EARLIER)
            has_nan = tl.maximum(has_nan, tl.max((score != score).to(tl.int32), 0))
            score = tl.where(score == score, score, float("-inf"))
            if temperature is not None:
                score = tl.div_rn(score, tl.zeros_like(score) + scale)
            if floor is not None:
                score = tl.where(score < limit, float("-inf"), score)
            if keys is not None:
                # noise is expensive, and a part may hold no candidate
                highest = tl.max(score, 0)
                if noisy & (highest > float("-inf")):
                    low, high = halves(tl.load(keys + row))
                    score = score - tl.log(exponential_at(index, low, high))
            top, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            found = tl.where(top > best, start + at, found)
            best = tl.maximum(best, top)
    out = row * tl.num_programs(0) + chunk
    tl.store(tops + out, tl.where(has_nan > 0, float("nan"), best))
    tl.store(chunk_ids + out, found)
