"""Argmax and sampling: one kernel finds the best token per chunk of a row, a second one the best chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.sample.reference import Choice, Penalty
from slipstream.ops.sample.triton.floor import SPAN, find_floor_and_peaks
from slipstream.ops.sample.triton.noise import exponential_at, halves, uniform_at
from slipstream.ops.sample.triton.penalty import num_earlier, penalized

_CHUNK = 4096
_DRAW_CHUNK = 2048  # noise takes more registers per token
# with top-k, top-p or min-p most parts of a chunk hold no candidate
_CUT_CHUNK = 1024
_PART = 256


def argmax_rows(logits: torch.Tensor, penalty: Penalty | None = None) -> Choice:
    return _choose(logits, None, None, None, None, penalty)


def draw(
    logits: torch.Tensor,
    keys: torch.Tensor,  # [R] int64
    random: torch.Tensor | None = None,  # [R] bool
    temperature: torch.Tensor | None = None,  # [R]
    limits: torch.Tensor | None = None,  # [R, 3]
    penalty: Penalty | None = None,
) -> Choice:
    return _choose(logits, keys, random, temperature, limits, penalty)


def _choose(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    random: torch.Tensor | None,
    temperature: torch.Tensor | None,
    limits: torch.Tensor | None,
    penalty: Penalty | None,
) -> Choice:
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, "logits must be contiguous along the vocabulary"
    floor = peaks = None
    chunk = part = _CHUNK if keys is None else _DRAW_CHUNK
    num_warps = 4
    if limits is not None:
        floor, peaks = find_floor_and_peaks(logits, limits, temperature, penalty)
        chunk, part, num_warps = _CUT_CHUNK, _PART, 1
    num_chunks = triton.cdiv(size, chunk)
    tops = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    chunk_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _chunk_kernel[(num_chunks, num_rows)](
        logits,
        keys,
        None if random is None else random.view(torch.uint8),
        temperature,
        floor,
        peaks,
        *(penalty or (None,) * 5),
        tops,
        chunk_ids,
        logits.stride(0),
        size,
        EARLIER=num_earlier(penalty),
        CHUNK=chunk,
        PART=part,
        SPAN=SPAN,
        num_warps=num_warps,
    )
    _row_kernel[(num_rows,)](
        tops,
        chunk_ids,
        tokens,
        failed.view(torch.uint8),
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return Choice(tokens, failed)


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
    tops,
    chunk_ids,
    stride,
    size,
    EARLIER: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    SPAN: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    entry: tl.constexpr = None
    scale: tl.constexpr = None
    limit: tl.constexpr = None
    noisy = True
    if entries is not None:
        entry = tl.load(entries + row).to(tl.int64)
        counts += entry * size
        seen += entry * size
        values += row * 3
        if earlier is not None:
            earlier += row * EARLIER
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
        if stays:
            index = start + tl.arange(0, PART)
            score = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf")).to(tl.float32)
            if entries is not None:  # noqa: SIM102
                if entry >= 0:
                    score = penalized(score, index, index < size, counts, seen, values, earlier, EARLIER)
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
                    if floor is None:
                        score = _add_noise(score, highest, start, tl.load(keys + row), PART)
                    else:  # a part has few tokens left
                        low, high = halves(tl.load(keys + row))
                        score = score - tl.log(exponential_at(index, low, high))
            top, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            found = tl.where(top > best, start + at, found)
            best = tl.maximum(best, top)
    out = row * tl.num_programs(0) + chunk
    tl.store(tops + out, tl.where(has_nan > 0, float("nan"), best))
    tl.store(chunk_ids + out, found)


@triton.jit
def _add_noise(score, peak, start, key, PART: tl.constexpr):
    """score - log(E) with an exponential E for each token; -inf for tokens that cannot have the largest one.

    The largest score - log(E) has the smallest E * exp(-score); u <= E, and E <= u + u**2 for u < 0.6. So most parts
    have a single candidate, and only its logarithms are computed. `peak`: the largest score.
    """
    low, high = halves(key)
    offset = tl.arange(0, PART)
    u = uniform_at(start + offset, low, high)
    least = u * tl.exp(peak - score)
    # more than the rounding of the two, and of the scores with noise
    limit = tl.min(tl.where(u < 0.6, least + least * u, float("inf")), 0) * tl.exp(0.001 + tl.abs(peak) * 1e-6)
    is_candidate = least <= limit
    # the number of candidates and the offset of a single one
    coded = tl.sum(tl.where(is_candidate, 2 * PART + offset, 0), 0)
    if (coded >= 2 * PART) & (coded < 4 * PART) & (peak < float("inf")):
        only = tl.max(tl.where(is_candidate, score, float("-inf")), 0)
        only = only - tl.log(exponential_at(start + coded - 2 * PART, low, high))
        score = tl.where(is_candidate, only, float("-inf"))
    else:
        score = score - tl.log(exponential_at(start + offset, low, high))
    return score


# grid: (rows,)
@triton.jit(do_not_specialize=["num_chunks"])
def _row_kernel(tops, chunk_ids, tokens, failed, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(tops + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    has_nan = tl.max((top != top).to(tl.int32), 0) > 0
    best, winner = tl.max(
        tl.where(top == top, top, float("-inf")), 0, return_indices=True, return_indices_tie_break_left=True
    )
    no_token = has_nan | (best == float("-inf"))
    token = tl.load(chunk_ids + row * num_chunks + winner).to(tl.int64)
    tl.store(tokens + row, tl.where(no_token, 0, token))
    tl.store(failed + row, no_token.to(tl.uint8))
