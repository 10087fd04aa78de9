"""find_floor: the smallest logit of each row that min-p, top-a, top-k and top-p keep, without a sort.

One pass over the logits stores the maximum (peak) of every span of 128 logits, and sums. The peaks limit the search: if
k peaks reach a value, at least k logits do, so the k-th largest logit is in one of these k spans, a few thousand logits
instead of the whole vocabulary. The same holds for top-p when the peaks that reach a value have the mass that top-p
asks for. A search with three pivots per round then finds the largest value that enough logits reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from slipstream.ops.sampling.edit import find_penalty, num_earlier, with_penalty
from slipstream.ops.sampling.reference import Penalty

SPAN = 128  # logits per peak
_SPANS = 32  # per chunk
_TILE = 64  # spans loaded at a time
_NUM_LIMITS = tl.constexpr(4)  # of a row


def find_floor(
    logits: torch.Tensor,  # [R, V]
    limits: torch.Tensor,  # [R, 4] log of min_p, top_k, top_p, log of top_a
    order: Sequence[tuple[torch.Tensor, int]] | None = (),  # ignored: there is no sort
    temperature: torch.Tensor | None = None,  # [R]
    penalty: Penalty | None = None,
) -> torch.Tensor:
    """[R] float32. Within rounding, the sum of top-p may decide differently from a sort. The floor of a row that holds
    NaN is NaN, which drops nothing."""
    return find_floor_and_peaks(logits, limits, temperature, penalty)[0]


def find_floor_and_peaks(
    logits: torch.Tensor, limits: torch.Tensor, temperature: torch.Tensor | None, penalty: Penalty | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The floors, and the peaks [R, spans] after penalties and temperature; peaks of rows without limits are
    undefined."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1 and limits.is_contiguous() and limits.shape == (num_rows, _NUM_LIMITS.value)
    num_spans = triton.cdiv(size, SPAN)
    num_chunks = triton.cdiv(num_spans, _SPANS)
    device = logits.device
    peaks = torch.empty(num_rows, num_spans, dtype=torch.float32, device=device)
    stats = torch.empty(num_rows, 3, num_chunks, dtype=torch.float32, device=device)
    listed = torch.empty(num_rows, num_spans, dtype=torch.int32, device=device)
    floor = torch.empty(num_rows, dtype=torch.float32, device=device)
    penalties, num = penalty or (None,) * 5, num_earlier(penalty)
    _survey_kernel[(num_chunks, num_rows)](
        logits,
        limits,
        temperature,
        *penalties,
        peaks,
        stats,
        logits.stride(0),
        size,
        num_spans,
        EARLIER=num,
        SPAN=SPAN,
        SPANS=_SPANS,
        num_warps=4,
    )
    _floor_kernel[(num_rows,)](
        logits,
        limits,
        temperature,
        *penalties,
        peaks,
        stats,
        listed,
        floor,
        logits.stride(0),
        size,
        num_spans,
        num_chunks,
        EARLIER=num,
        ALL_SPANS=triton.next_power_of_2(num_spans),
        ALL_CHUNKS=triton.next_power_of_2(num_chunks),
        SPAN=SPAN,
        TILE=_TILE,
        num_warps=8,
        maxnreg=128,  # two programs per multiprocessor
    )
    return floor, peaks


@triton.jit
def _load_limits(limits, row, size):
    """The limits of a row, and which of them are active."""
    limits += row * _NUM_LIMITS
    log_min_p = tl.load(limits).to(tl.float32)
    top_k = tl.load(limits + 1).to(tl.int32)
    # a very small top_p rounds to 0, and a mass of 0 would be reached above the largest logit too
    top_p = tl.maximum(tl.load(limits + 2).to(tl.float32), 1e-30)
    log_top_a = tl.load(limits + 3).to(tl.float32)
    has_a = log_top_a > float("-inf")
    has_min = has_a | (log_min_p > float("-inf"))  # the largest logit alone bounds the floor
    has_k = top_k < size
    has_p = top_p <= 1.0
    return log_min_p, top_k, top_p, log_top_a, has_min, has_k, has_p, has_a


@triton.jit
def _load_logits(
    row_args,  # of a row: logits, vocabulary size, temperature, penalty, number of further tokens
    offset,
    mask,
):
    """Logits after penalties and temperature."""
    own, size, temperature, penalty, EARLIER = row_args
    x = tl.load(own + offset, mask=mask & (offset < size), other=float("-inf")).to(tl.float32)
    x = with_penalty(x, offset, mask, size, penalty, EARLIER)
    if temperature is not None:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return x


# grid: (chunks, rows)
@triton.jit(do_not_specialize_on_alignment=["entries"])
def _survey_kernel(
    logits,
    limits,
    temperature,
    counts,
    seen,
    entries,
    values,
    earlier,
    peaks,
    stats,
    stride,
    size,
    num_spans,
    EARLIER: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Per chunk: the peak of each span; the maximum, or NaN if the chunk holds one; the minimum above -inf; and for
    top-a, and top-p without other limits, the sum of exp(x - maximum)."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    log_min_p, top_k, top_p, log_top_a, has_min, has_k, has_p, has_a = _load_limits(limits, row, size)
    if has_min | has_k | has_p:
        span = chunk * SPANS + tl.arange(0, SPANS)
        offset = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        penalty: tl.constexpr = None
        if entries is not None:
            penalty = find_penalty(row, size, counts, seen, entries, values, earlier, EARLIER)
        row_args = (logits + row * stride, size, None, penalty, EARLIER)
        x = _load_logits(row_args, offset, True)
        has_nan = tl.max(tl.max((x != x).to(tl.int32), 1), 0) > 0
        x = tl.where(x == x, x, float("-inf"))
        peak = tl.max(x, 1)
        low = tl.min(tl.where(x > float("-inf"), x, float("inf")), 1)
        if temperature is not None:
            # a division keeps the order
            scale = tl.load(temperature + row)
            peak = tl.div_rn(peak, tl.zeros_like(peak) + scale)
            low = tl.maximum(tl.div_rn(low, tl.zeros_like(low) + scale), -3.4028234663852886e38)  # keep it finite
        tl.store(peaks + row * num_spans + span, peak, mask=span < num_spans)
        top = tl.max(peak, 0)
        total = tl.full([], 0.0, tl.float32)
        if has_a | (has_p & (has_k == 0) & (has_min == 0)):  # with other limits the search sums
            if temperature is not None:
                x = tl.div_rn(x, tl.zeros_like(x) + scale)
            # inf - inf is NaN; the sum of such a row is not used
            weight = tl.exp(x - tl.where(top > float("-inf"), top, 0.0))
            total = tl.sum(tl.sum(weight, 1), 0)
        num_chunks = tl.num_programs(0)
        where = stats + row * 3 * num_chunks + chunk
        tl.store(where, tl.where(has_nan, float("nan"), top))
        tl.store(where + num_chunks, total)
        tl.store(where + 2 * num_chunks, tl.min(low, 0))


# grid: (rows,)
@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["entries"])
def _floor_kernel(
    logits,
    limits,
    temperature,
    counts,
    seen,
    entries,
    values,
    earlier,
    peaks,
    stats,
    listed,
    floor,
    stride,
    size,
    num_spans,
    num_chunks,
    EARLIER: tl.constexpr,
    ALL_SPANS: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    log_min_p, top_k, top_p, log_top_a, has_min, has_k, has_p, has_a = _load_limits(limits, row, size)
    found = tl.full([], float("-inf"), tl.float32)
    if has_min | has_k | has_p:
        span = tl.arange(0, ALL_SPANS)
        peak = tl.load(peaks + row * num_spans + span, mask=span < num_spans, other=float("-inf"))
        best = tl.max(peak, 0)
        found = best + log_min_p
        chunk = tl.arange(0, ALL_CHUNKS)
        where = stats + row * 3 * num_chunks + chunk
        top = tl.load(where, mask=chunk < num_chunks, other=float("-inf"))
        if tl.max((top != top).to(tl.int32), 0) > 0:
            found = tl.full([], float("nan"), tl.float32)
        elif (best == float("inf")) | (best == float("-inf")):
            # an infinite logit: only equal logits are kept
            found = best
        elif has_k | has_p | has_a:
            total = tl.load(where + num_chunks, mask=chunk < num_chunks, other=0.0)
            low = tl.load(where + 2 * num_chunks, mask=chunk < num_chunks, other=float("inf"))
            total = tl.sum(total * tl.exp(top - best), 0)
            if has_a:
                found = tl.maximum(found, best + (log_top_a - tl.log(total)))
            bottom = tl.maximum(found, tl.min(low, 0))

            # the floor is at least the largest value that enough peaks reach
            top_p_alone = has_p & (has_k == 0) & (has_min == 0)
            if has_k | top_p_alone:
                reached = _reach_of_peaks(peak, best, has_k, top_k, top_p * total, TILE)
                bottom = tl.maximum(bottom, reached)

            # spans with a logit of at least that value
            active = (peak >= bottom) & (span < num_spans)
            spans = listed + row * num_spans
            tl.store(spans + tl.cumsum(active.to(tl.int32), 0) - 1, span, mask=active)
            num_active = tl.sum(active.to(tl.int32), 0)
            tl.debug_barrier()

            own = logits + row * stride
            scale: tl.constexpr = None
            if temperature is not None:
                scale = tl.load(temperature + row)
            penalty: tl.constexpr = None
            if entries is not None:
                penalty = find_penalty(row, size, counts, seen, entries, values, earlier, EARLIER)
            row_args = (own, size, scale, penalty, EARLIER)
            # the first spans stay in registers; mostly there are no others
            in_registers = _load_spans(row_args, spans, 0, num_active, SPAN, TILE)
            count, mass = _measure(row_args, spans, num_active, in_registers, best, bottom, SPAN, TILE)
            # first top-k, then top-p among the remaining tokens
            for by_mass in range(2):
                goal = top_k.to(tl.float32)
                asked = has_k & (count > top_k)
                if by_mass:
                    # ties with the k-th logit are kept, but only k logits count
                    surplus = tl.maximum(count - top_k, 0).to(tl.float32) * tl.exp(bottom - best)
                    goal = top_p * tl.where(top_p_alone, total, mass - surplus)
                    asked = has_p
                if asked:
                    bottom, count, mass = _search(
                        row_args, spans, num_active, in_registers, best, bottom, count, mass, goal, by_mass, SPAN, TILE
                    )
            found = bottom
    tl.store(floor + row, found)


@triton.jit
def _reach_of_peaks(peak, best, by_count, count_goal, mass_goal, TILE: tl.constexpr):
    """A value that is reached by at least as many peaks as the goal, and by few more; -inf if there is none."""
    weight = tl.exp(peak - best)
    low = tl.min(tl.where(peak > float("-inf"), peak, float("inf")), 0)
    high = best
    over = peak >= low
    count = tl.sum(over.to(tl.int32), 0)
    mass = tl.sum(tl.where(over, weight, 0.0), 0)
    enough = (by_count & (count >= count_goal)) | ((by_count == 0) & (mass >= mass_goal))
    reached = tl.where(enough, low, float("-inf"))
    rounds = tl.where(enough, 24, 0)
    while (rounds > 0) & (count > TILE):
        middle = 0.5 * low + 0.5 * high
        over = peak >= middle
        num = tl.sum(over.to(tl.int32), 0)
        mass = tl.sum(tl.where(over, weight, 0.0), 0)
        enough = (by_count & (num >= count_goal)) | ((by_count == 0) & (mass >= mass_goal))
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, num, count)
        reached = low
        rounds -= 1
    return reached


@triton.jit
def _load_spans(row_args, spans, start, num_active, SPAN: tl.constexpr, TILE: tl.constexpr):
    index = start + tl.arange(0, TILE)
    span = tl.load(spans + index, mask=index < num_active, other=0)
    offset = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    return _load_logits(row_args, offset, (index < num_active)[:, None])


@triton.jit
def _count(x, weight, pivot):
    """The number of logits >= pivot, and the sum of their weights."""
    over = x >= pivot
    return tl.sum(tl.sum(over.to(tl.int32), 1), 0), tl.sum(tl.sum(tl.where(over, weight, 0.0), 1), 0)


@triton.jit
def _measure(row_args, spans, num_active, in_registers, best, pivot, SPAN: tl.constexpr, TILE: tl.constexpr):
    """`_count` over all active spans."""
    count, mass = _count(in_registers, tl.exp(in_registers - best), pivot)
    for start in range(TILE, num_active, TILE):
        x = _load_spans(row_args, spans, start, num_active, SPAN, TILE)
        num, part = _count(x, tl.exp(x - best), pivot)
        count += num
        mass += part
    return count, mass


@triton.jit
def _search(
    row_args,
    spans,
    num_active,
    in_registers,  # logits of the first spans
    best,
    low,  # reached by enough: `count` logits with weight `mass`
    count,
    mass,
    goal,
    by_mass,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest value that enough logits reach, or a smaller one that the same logits reach; their count and
    weight."""
    high = best + tl.maximum(tl.abs(best) * 1e-6, 1e-30)  # reached by too few
    count_high = tl.full([], 0, tl.int32)
    going = count > 1
    while going:
        middle = 0.5 * low + 0.5 * high
        left = 0.5 * low + 0.5 * middle
        right = 0.5 * middle + 0.5 * high
        weight = tl.exp(in_registers - best)
        c1, m1 = _count(in_registers, weight, left)
        c2, m2 = _count(in_registers, weight, middle)
        c3, m3 = _count(in_registers, weight, right)
        for start in range(TILE, num_active, TILE):
            x = _load_spans(row_args, spans, start, num_active, SPAN, TILE)
            weight = tl.exp(x - best)
            num, part = _count(x, weight, left)
            c1 += num
            m1 += part
            num, part = _count(x, weight, middle)
            c2 += num
            m2 += part
            num, part = _count(x, weight, right)
            c3 += num
            m3 += part
        enough1 = tl.where(by_mass != 0, m1, c1.to(tl.float32)) >= goal
        enough2 = tl.where(by_mass != 0, m2, c2.to(tl.float32)) >= goal
        enough3 = tl.where(by_mass != 0, m3, c3.to(tl.float32)) >= goal
        going = (middle > low) & (middle < high)  # false for adjacent floats
        between = count - count_high
        low = tl.where(enough3, right, tl.where(enough2, middle, tl.where(enough1, left, low)))
        count = tl.where(enough3, c3, tl.where(enough2, c2, tl.where(enough1, c1, count)))
        mass = tl.where(enough3, m3, tl.where(enough2, m2, tl.where(enough1, m1, mass)))
        high = tl.where(enough3, high, tl.where(enough2, right, tl.where(enough1, middle, left)))
        count_high = tl.where(enough3, count_high, tl.where(enough2, c3, tl.where(enough1, c2, c1)))
        # one logit between low and high: the result
        going = going & (count - count_high > 1) & ((by_mass != 0) | (count.to(tl.float32) > goal))
        if going & (count - count_high == between):
            # the logits between may all be equal, which is common for 16-bit logits
            first, last = _ends(in_registers, low, high)
            for start in range(TILE, num_active, TILE):
                smallest, largest = _ends(_load_spans(row_args, spans, start, num_active, SPAN, TILE), low, high)
                first = tl.minimum(first, smallest)
                last = tl.maximum(last, largest)
            low = first
            going = first < last
    return low, count, mass


@triton.jit
def _ends(x, low, high):
    """The smallest logit >= low and the largest logit < high."""
    first = tl.min(tl.min(tl.where(x >= low, x, float("inf")), 1), 0)
    return first, tl.max(tl.max(tl.where(x < high, x, float("-inf")), 1), 0)


# The noise that ops/sampling/reference.py defines, with the same bits.

_BLOCK = 1024


@triton.jit
def noise_at(index, low, high):
    """uint32 noise of an index; the step key is given as two uint32 halves."""
    x = index.to(tl.uint32) + low
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) ^ high
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    x = (x ^ (x >> 16)) * tl.full([], 0x31848BAB, tl.uint32)
    return x ^ (x >> 14)


@triton.jit
def halves(key):
    """The low and the high 32 bits of a step key."""
    bits = key.to(tl.uint64)
    return (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def uniform_at(index, low, high):
    """The noise at an index as a number between 0 and 1, neither of them included."""
    u = (noise_at(index, low, high).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return tl.minimum(u, 0.99999994)  # the largest float32 below 1


@triton.jit
def exponential_at(index, low, high):
    """-log1p(-u) of the noise at an index."""
    u = uniform_at(index, low, high)
    # log1p by log: the quotient corrects the rounding of 1 - u
    w = 1.0 - u
    return tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0)))


def noise_bits(keys: torch.Tensor, num: int) -> torch.Tensor:
    """[R] int64 step keys to [R, num] int32."""
    out = torch.empty(len(keys), num, dtype=torch.int32, device=keys.device)
    _bits_kernel[(triton.cdiv(num, _BLOCK), len(keys))](keys, out, num, BLOCK=_BLOCK)
    return out


# grid: (blocks, rows)
@triton.jit
def _bits_kernel(keys, out, num, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = halves(tl.load(keys + row))
    tl.store(out + row * num + index, noise_at(index, low, high).to(tl.int32, bitcast=True), mask=index < num)


def step_keys(row_keys: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """[R] int64 row keys and [R] int64 positions to [R] int64 step keys."""
    out = torch.empty_like(row_keys)
    _keys_kernel[(triton.cdiv(len(out), _BLOCK),)](row_keys, positions, out, len(out), PURPOSE=purpose, BLOCK=_BLOCK)
    return out


# grid: (blocks of rows,)
@triton.jit(do_not_specialize=["num"])
def _keys_kernel(row_keys, positions, out, num, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num
    row_key = tl.load(row_keys + row, mask=mask, other=0)
    step_key = step_key_of(row_key, tl.load(positions + row, mask=mask, other=0), PURPOSE)
    tl.store(out + row, step_key.to(tl.int64), mask=mask)


@triton.jit
def step_key_of(row_key, position, PURPOSE: tl.constexpr):
    """The step key of a row key at a position, as uint64."""
    step = position.to(tl.uint64) * 4 + (PURPOSE + 1)
    z = row_key.to(tl.uint64) + step * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)
