"""Argmax, and sampling with limits: one kernel finds the best token per chunk of a row, a second one the best chunk.
`draw_unlimited` samples without limits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.platform.pdl import dependent, release_next, wait_for_previous
from slipstream.ops.sampling import reference
from slipstream.ops.sampling.edit import (
    allows_any,
    find_mask,
    find_penalty,
    is_allowed,
    mask_bits_,
    num_earlier,
    with_penalty,
)
from slipstream.ops.sampling.floor import (
    SPAN,
    exponential_at,
    find_floor_and_peaks,
    halves,
    step_key_of,
    step_keys,
    uniform_at,
)
from slipstream.ops.sampling.reference import DRAW, Choice, DrawTables, Penalty, RowHints, TokenMask

_CHUNK = 4096
_DRAW_CHUNK = 2048  # noise takes more registers per token
# with top-k, top-p or min-p most parts of a chunk hold no candidate
_CUT_CHUNK = 1024
_PART = 256


def argmax_rows(
    logits: torch.Tensor, penalty: Penalty | None = None, mask: TokenMask | None = None, hints: RowHints | None = None
) -> Choice:
    return _choose(logits, None, None, None, None, penalty, mask)


def draw_by_row(
    logits: torch.Tensor,
    rows: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
    tables: DrawTables,
    penalty: Penalty | None = None,
    mask: TokenMask | None = None,
    hints: RowHints | None = None,
) -> Choice:
    if tables.limits is None:
        return draw_unlimited(logits, rows, positions, tables, penalty, mask)
    keys = step_keys(tables.keys.index_select(0, rows), positions, DRAW)
    random = tables.is_random.index_select(0, rows)
    temperature = None if tables.temperatures is None else tables.temperatures.index_select(0, rows)
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


# The best token of a row from those of its parts.


def best_parts(tops: torch.Tensor, ids: torch.Tensor, max_parts: int) -> Choice:
    """`tops` [R, parts]: the largest score of each part, NaN if it has one; `ids` [R, parts]: its token. At most
    `max_parts` parts, for which one kernel is compiled."""
    num_rows, num_parts = tops.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=tops.device)
    failed = torch.empty(num_rows, dtype=torch.bool, device=tops.device)
    _row_kernel[(num_rows,)](
        tops,
        ids,
        tokens,
        failed.view(torch.uint8),
        num_parts,
        PARTS=triton.next_power_of_2(max_parts),
        num_warps=1,
        **dependent(tops.device, num_rows),
    )
    return Choice(tokens, failed)


# grid: (rows,)
@triton.jit(do_not_specialize=["num_parts"])
def _row_kernel(tops, ids, tokens, failed, num_parts, PARTS: tl.constexpr, DEPENDENT: tl.constexpr):
    release_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top = tl.load(tops + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    has_nan = tl.max((top != top).to(tl.int32), 0) > 0
    best, winner = tl.max(
        tl.where(top == top, top, float("-inf")), 0, return_indices=True, return_indices_tie_break_left=True
    )
    no_token = has_nan | (best == float("-inf"))
    token = tl.load(ids + row * num_parts + winner).to(tl.int64)
    tl.store(tokens + row, tl.where(no_token, 0, token))
    tl.store(failed + row, no_token.to(tl.uint8))


# Sampling without limits: one token per row, the largest score - log(E) with an exponential E for each token.
#
# A program finds the best token of a part of a row, a second kernel the best part. Each lane scans its tokens with an
# estimate of E * exp(-score), which takes no logarithm and no division, and keeps its best token and the second-best
# estimate. Exact values are computed for tokens that may be the best one, nearly always a single token. If the
# second-best token of a lane may be it, which is rare, the program scans its part again with exact values.

_BLOCK = 1024
_MAX_BLOCKS = 32  # of a part
_NUM_PROGRAMS = 1024  # that fill the device
_DRAW = tl.constexpr(reference.DRAW)


def draw_unlimited(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: DrawTables,
    penalty: Penalty | None,
    mask: TokenMask | None,
) -> Choice:
    """`draw_by_row` without limits. Parts do not change a token, so they may depend on the number of rows. The kernel
    reads the tables at its row and makes the step key."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, "logits must be contiguous along the vocabulary"
    num_blocks = triton.cdiv(size, _BLOCK)
    each = max(1, min(_MAX_BLOCKS, num_blocks * num_rows // _NUM_PROGRAMS))
    num_parts = triton.cdiv(num_blocks, each)
    tops = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    _draw_kernel[(num_parts, num_rows)](
        logits,
        tables.keys,
        tables.is_random.view(torch.uint8),
        tables.temperatures,
        rows,
        positions,
        *(penalty or (None,) * 5),
        *(mask or (None,) * 3),
        tops,
        ids,
        logits.stride(0),
        size,
        0 if mask is None else mask.bits.shape[1],
        each,
        EARLIER=num_earlier(penalty),
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent(logits.device, num_rows),
    )
    return best_parts(tops, ids, num_blocks)


# grid: (parts, rows)
@triton.jit(do_not_specialize=["each"], do_not_specialize_on_alignment=["rows", "positions", "entries"])
def _draw_kernel(
    logits,
    keys,
    random,
    temperature,
    rows,
    positions,
    counts,
    seen,
    entries,
    values,
    earlier,
    bits,
    mask_entries,
    mask_index,
    tops,
    ids,
    stride,
    size,
    num_words,
    each,
    EARLIER: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release_next(DEPENDENT)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    logits += row * stride
    wait_for_previous(DEPENDENT)
    entry = tl.load(rows + row)  # in the tables
    low, high = halves(step_key_of(tl.load(keys + entry), tl.load(positions + row), _DRAW))
    scale = tl.full([], 1.0, tl.float32)
    if temperature is not None:
        scale = tl.load(temperature + entry).to(tl.float32)
    noisy = tl.load(random + entry) != 0
    penalty: tl.constexpr = None
    if entries is not None:
        penalty = find_penalty(row, size, counts, seen, entries, values, earlier, EARLIER)
    mask_entry: tl.constexpr = None
    if bits is not None:
        mask_entry, bits = find_mask(row, bits, mask_entries, mask_index, num_words)
    first = part * each * BLOCK
    last = tl.minimum(first + each * BLOCK, size)
    lane = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    found = first
    peak = tl.full([BLOCK], float("-inf"), tl.float32)  # NaN if the lane has one
    scan = noisy == 0
    if noisy:
        factor = tl.div_rn(1.4426950408889634, scale)
        # of a token u * exp(base - score), where u <= E; base is the largest score of the first block
        block = tl.load(logits + first + lane, mask=first + lane < size, other=float("-inf")).to(tl.float32)
        base = tl.max(tl.where(tl.abs(block) < float("inf"), block * factor, float("-inf")), 0)
        base = tl.where(base > float("-inf"), base, 0.0)
        best = tl.full([BLOCK], float("inf"), tl.float32)
        second = tl.full([BLOCK], float("inf"), tl.float32)
        at = tl.zeros([BLOCK], tl.int32) + first
        for start in range(first, last, BLOCK):
            stays = True
            if bits is not None:
                stays = allows_any(bits, mask_entry, start, num_words, BLOCK)
            if stays:
                index = start + lane
                score = tl.load(logits + index, mask=index < size, other=float("-inf")).to(tl.float32)
                if bits is not None:
                    score = tl.where(is_allowed(bits, mask_entry, index, size), score, float("-inf"))
                score = with_penalty(score, index, True, size, penalty, EARLIER)
                peak = tl.maximum(peak, score, propagate_nan=tl.PropagateNan.ALL)
                least = uniform_at(index, low, high) * tl.exp2(base - score * factor)
                is_less = least < best
                second = tl.minimum(second, tl.maximum(best, least))
                at = tl.where(is_less, index, at)
                best = tl.minimum(best, least)
        u = uniform_at(at, low, high)
        # E <= u + u**2 for u < 0.6
        limit = tl.min(tl.where(u < 0.6, best + best * u, float("inf")), 0)
        highest = tl.max(tl.where(peak == peak, peak, float("-inf")), 0) * factor
        # more than the rounding of estimates and values
        limit *= tl.exp2(0.002 + 2e-6 * (tl.abs(base) + tl.abs(highest)))
        is_candidate = best <= limit
        num_candidates = tl.sum(is_candidate.to(tl.int32), 0)
        # estimates far above or below the base are 0 or infinite
        is_open = (tl.min(second, 0) <= limit) | (highest > base + 64.0) | (tl.min(best, 0) == float("inf"))
        scan = is_open & (highest > float("-inf"))
        if num_candidates == 1:
            found = tl.max(tl.where(is_candidate, at, 0), 0)
            score = tl.load(logits + found).to(tl.float32)
            score = with_penalty(score, found, True, size, penalty, EARLIER)
            if temperature is not None:
                score = tl.div_rn(score, scale)
            top = score - tl.log(exponential_at(found, low, high))
        elif is_open == 0:
            score = tl.load(logits + at).to(tl.float32)
            score = with_penalty(score, at, True, size, penalty, EARLIER)
            if temperature is not None:
                score = tl.div_rn(score, tl.zeros_like(score) + scale)
            score = tl.where(is_candidate, score - tl.log(exponential_at(at, low, high)), float("-inf"))
            top = tl.max(score, 0)
            found = tl.min(tl.where(score == top, at, 2147483647), 0)
    if scan:
        exact = tl.full([BLOCK], float("-inf"), tl.float32)
        at = tl.zeros([BLOCK], tl.int32) + first
        for start in range(first, last, BLOCK):
            index = start + lane
            score = tl.load(logits + index, mask=index < size, other=float("-inf")).to(tl.float32)
            if bits is not None:
                score = tl.where(is_allowed(bits, mask_entry, index, size), score, float("-inf"))
            score = with_penalty(score, index, True, size, penalty, EARLIER)
            peak = tl.maximum(peak, score, propagate_nan=tl.PropagateNan.ALL)
            if temperature is not None:
                score = tl.div_rn(score, tl.zeros_like(score) + scale)
            if noisy:
                score = score - tl.log(exponential_at(index, low, high))
            at = tl.where(score > exact, index, at)
            exact = tl.where(score > exact, score, exact)
        top = tl.max(exact, 0)
        found = tl.min(tl.where(exact == top, at, 2147483647), 0)
    has_nan = tl.max((peak != peak).to(tl.int32), 0) > 0
    out = row * tl.num_programs(0) + part
    tl.store(tops + out, tl.where(has_nan, float("nan"), top))
    tl.store(ids + out, found)
