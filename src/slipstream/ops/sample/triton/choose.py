"""One token for each row: the likeliest, or drawn with noise. Chunks of a row find their best, then the row its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.ops.sample.reference import Choice, Penalty
from slipstream.ops.sample.triton.noise import exponential_at, halves
from slipstream.ops.sample.triton.penalty import penalized

_CHUNK = 4096


def likeliest(logits: torch.Tensor, penalty: Penalty | None = None) -> Choice:
    return _choose(logits, None, None, None, None, penalty)


def draw(
    logits: torch.Tensor,
    keys: torch.Tensor,  # [R] int64
    random: torch.Tensor | None = None,  # [R] bool
    temperature: torch.Tensor | None = None,  # [R]
    floor: torch.Tensor | None = None,  # [R]
    penalty: Penalty | None = None,
) -> Choice:
    return _choose(logits, keys, random, temperature, floor, penalty)


def _choose(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    random: torch.Tensor | None,
    temperature: torch.Tensor | None,
    floor: torch.Tensor | None,
    penalty: Penalty | None,
) -> Choice:
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, "a row of logits must lie in one piece"
    num_chunks = triton.cdiv(size, _CHUNK)
    tops = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _chunk_kernel[(num_chunks, num_rows)](
        logits,
        keys,
        None if random is None else random.view(torch.uint8),
        temperature,
        floor,
        *(penalty or (None, None, None, None)),
        tops,
        places,
        logits.stride(0),
        size,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    _row_kernel[(num_rows,)](
        tops,
        places,
        tokens,
        failed.view(torch.uint8),
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return Choice(tokens, failed)


# grid: (chunks, rows)
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _chunk_kernel(
    logits,
    keys,
    random,
    temperature,
    floor,
    counts,
    seen,
    slots,
    values,
    tops,
    places,
    stride,
    size,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, CHUNK)
    index = chunk * CHUNK + place
    score = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf")).to(tl.float32)
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            score = penalized(score, index, index < size, counts + slot * size, seen + slot * size, values + row * 3)
    spoilt = tl.max((score != score).to(tl.int32), 0)
    if temperature is not None:
        score = tl.div_rn(score, tl.zeros_like(score) + tl.load(temperature + row))
    if floor is not None:
        score = tl.where(score < tl.load(floor + row), float("-inf"), score)
    if keys is not None:
        # noise is costly, and most chunks of a truncated row are empty
        noisy = tl.max(tl.where(score == score, score, float("-inf")), 0) > float("-inf")
        if random is not None:
            noisy = noisy & (tl.load(random + row) != 0)
        if noisy:
            low, high = halves(tl.load(keys + row))
            score = score - tl.log(exponential_at(index, low, high))
    score = tl.where(score == score, score, float("-inf"))
    top, best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(0) + chunk
    tl.store(tops + out, tl.where(spoilt > 0, float("nan"), top))
    tl.store(places + out, chunk * CHUNK + best)


# grid: (rows,)
@triton.jit(do_not_specialize=["num_chunks"])
def _row_kernel(tops, places, tokens, failed, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(tops + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    spoilt = tl.max((top != top).to(tl.int32), 0) > 0
    best, winner = tl.max(
        tl.where(top == top, top, float("-inf")), 0, return_indices=True, return_indices_tie_break_left=True
    )
    no_token = spoilt | (best == float("-inf"))
    token = tl.load(places + row * num_chunks + winner).to(tl.int64)
    tl.store(tokens + row, tl.where(no_token, 0, token))
    tl.store(failed + row, no_token.to(tl.uint8))
