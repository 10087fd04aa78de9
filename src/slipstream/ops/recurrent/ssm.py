"""State space scans in plain torch, in float32 at least, in float64 when the state is float64.

Mamba-2 (SSD), for each head, with state S [head dim, state size], step size dt and decay a < 0:

    S = exp(dt a) S + dt x b^T
    y = S c + d x

A chunk of several tokens is a few matrix products: scores c_i . b_j, times the decay between i and j, applied to dt x.
Mamba-1 has a decay for each channel and state; a chunk is a scan by doubling, and y is scaled by silu(z). A token that
the state has seen has dt = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.ops.recurrent.replay import Recurrence, remember_, replay_, verify_
from slipstream.ops.recurrent.steps import RecurrentSteps, max_chunks, seen_tokens

ROWS = 4  # rows of one token that are computed together: bounds the memory for copies of states


class SsdWeights(NamedTuple):
    a_log: torch.Tensor  # [heads], float32 or float64; a = -exp(a_log)
    dt_bias: torch.Tensor  # [heads], as a_log
    d: torch.Tensor  # [heads], as a_log
    dt_min: float = 0.0  # limits of dt after its softplus
    dt_max: float = float("inf")


class SelectiveWeights(NamedTuple):
    a_log: torch.Tensor  # [channels, state size], float32 or float64
    dt_bias: torch.Tensor  # [channels], as a_log
    d: torch.Tensor  # [channels], as a_log


def ssd_scan(
    x: torch.Tensor,  # [T, heads, head dim]
    dt: torch.Tensor,  # [T, heads], before bias and softplus
    b: torch.Tensor,  # [T, groups, state size]
    c: torch.Tensor,  # as b
    weights: SsdWeights,
    state: torch.Tensor,  # [slots, heads, head dim, state size], float32 or float64
    steps: RecurrentSteps,
    replay: torch.Tensor | None = None,  # [rows, columns, numbers of x, b and dt], with drafts: inputs by position
) -> torch.Tensor:
    """Mamba-2: [T, heads, head dim]. A group of b and c serves heads / groups neighbours.

    A row whose state has seen no token starts from zeros, whatever its slot holds. The new states go to the rows'
    slots, and the states at the ends of chunks with a save to the save slots. Tokens of no row get zeros.
    """
    wide = state.dtype
    repeats = x.shape[1] // b.shape[1]

    def sizes(dt: torch.Tensor) -> torch.Tensor:
        return F.softplus(dt.to(wide) + weights.dt_bias).clamp(weights.dt_min, weights.dt_max)

    def repeated(part: torch.Tensor) -> torch.Tensor:
        return part.to(wide).repeat_interleave(repeats, 1, output_size=len(weights.d))

    def recall(slot: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert replay is not None
        of_x, of_b, of_dt = replay[slot, position % replay.shape[1]].split([x[0].numel(), b[0].numel(), dt.shape[1]], 1)
        return of_x.unflatten(1, x.shape[1:]), of_b.unflatten(1, b.shape[1:]), sizes(of_dt)

    def change(inputs: tuple[torch.Tensor, ...], current: torch.Tensor) -> torch.Tensor:
        now, written, size = inputs[0].to(wide), repeated(inputs[1]), inputs[2]
        current = current * (-weights.a_log.exp() * size).exp()[..., None, None]
        return current + (now * size[..., None])[..., None] * written[..., None, :]

    def read(tokens: slice, current: torch.Tensor) -> torch.Tensor:
        return (current @ repeated(c[tokens])[..., None])[..., 0] + weights.d[:, None] * x[tokens].to(wide)

    def chunk(part: _Chunk, current: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now, steps_of = part.cut(x).to(wide), part.cut(size)
        falls = -weights.a_log.exp() * steps_of
        written, read = (part.cut(every).to(wide).transpose(0, 1) for every in (b, c))  # [groups, offsets, state size]
        total = falls.cumsum(0).T  # [heads, offsets]: log decay from the chunk's start
        between = (total[:, :, None] - total[:, None, :]).masked_fill(part.later, -torch.inf).exp()
        scores = (read @ written.mT).repeat_interleave(repeats, 0, output_size=len(weights.d)) * between
        scaled = (now * steps_of[..., None]).transpose(0, 1)  # [heads, offsets, head dim]
        recalled = (read[:, None] @ current.unflatten(0, (-1, repeats)).mT).flatten(0, 1) * total.exp()[..., None]
        out = (scores @ scaled + recalled).transpose(0, 1) + weights.d[:, None] * now
        ending = scaled * (total[:, -1:] - total).exp()[..., None]
        added = (ending.unflatten(0, (-1, repeats)).mT @ written[:, None]).flatten(0, 1)
        return out, current * total[:, -1].exp()[:, None, None] + added

    size = torch.where(seen_tokens(steps, len(x))[:, None], 0.0, sizes(dt))
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    recurrence = Recurrence(lambda tokens: (x[tokens], b[tokens], size[tokens]), recall, change, read)
    if replay is not None and steps.is_verified:
        remember_(replay, steps, torch.cat((x.flatten(1), b.flatten(1), dt), 1))
    _scan(out, state, steps, recurrence, chunk)
    return out.to(x.dtype)


def selective_scan(
    x: torch.Tensor,  # [T, channels]
    dt: torch.Tensor,  # [T, channels], before bias and softplus
    b: torch.Tensor,  # [T, state size]
    c: torch.Tensor,  # as b
    z: torch.Tensor,  # [T, channels]
    weights: SelectiveWeights,
    state: torch.Tensor,  # [slots, channels, state size], float32 or float64
    steps: RecurrentSteps,
    replay: torch.Tensor | None = None,  # [rows, columns, numbers of x, dt and b], with drafts: inputs by position
) -> torch.Tensor:
    """Mamba-1, times silu(z): [T, channels]. States as in `ssd_scan`."""
    wide = state.dtype
    a = -weights.a_log.exp()

    def sizes(dt: torch.Tensor) -> torch.Tensor:
        return F.softplus(dt.to(wide) + weights.dt_bias)

    def terms(x: torch.Tensor, size: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decay and input of each token, [tokens, channels, state size]."""
        return (size[..., None] * a).exp(), (size * x.to(wide))[..., None] * b.to(wide)[:, None]

    def recall(slot: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert replay is not None
        of_x, of_dt, of_b = replay[slot, position % replay.shape[1]].split([x.shape[1], dt.shape[1], b.shape[1]], 1)
        return of_x, sizes(of_dt), of_b

    def change(inputs: tuple[torch.Tensor, ...], current: torch.Tensor) -> torch.Tensor:
        decay, added = terms(*inputs)
        return current * decay + added

    def read(tokens: slice, current: torch.Tensor) -> torch.Tensor:
        return (current @ c[tokens].to(wide)[..., None])[..., 0]

    def chunk(part: _Chunk, current: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, added = terms(part.cut(x), part.cut(size), part.cut(b))  # size 0 past the end: no decay
        reach = 1  # tokens that the sum at each offset covers
        while reach < len(decay):
            added = torch.cat((added[:reach], added[reach:] + decay[reach:] * added[:-reach]))
            decay = torch.cat((decay[:reach], decay[reach:] * decay[:-reach]))
            reach *= 2
        states = added.addcmul_(decay, current)
        return (states @ part.cut(c).to(wide)[..., None])[..., 0], states[-1]

    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    size = torch.where(seen_tokens(steps, len(x))[:, None], 0.0, sizes(dt))
    recurrence = Recurrence(lambda tokens: (x[tokens], size[tokens], b[tokens]), recall, change, read)
    if replay is not None and steps.is_verified:
        remember_(replay, steps, torch.cat((x, dt, b), 1))
    _scan(out, state, steps, recurrence, chunk)
    used = torch.arange(len(x), device=x.device) < steps.starts[-1]
    found = (out + weights.d * x.to(wide)) * F.silu(z.to(wide))
    return torch.where(used[:, None], found, 0.0).to(x.dtype)


class _Chunk(NamedTuple):
    """Tokens of one chunk; offsets past its end hold zeros."""

    tokens: torch.Tensor  # [offsets]
    inside: torch.Tensor  # [offsets] bool
    later: torch.Tensor  # [offsets, offsets] bool: the second offset comes after the first

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        found = x.index_select(0, self.tokens)
        return torch.where(self.inside.view(-1, *(1,) * (x.dim() - 1)), found, 0.0)


_Made = tuple[torch.Tensor, torch.Tensor]  # outputs and the new state


def _scan(
    out: torch.Tensor,  # [T, ...] zeros, filled here
    state: torch.Tensor,
    steps: RecurrentSteps,
    recurrence: Recurrence,
    chunk: Callable[[_Chunk, torch.Tensor], _Made],
) -> None:
    """Rows of one token by the recurrence, some at a time; other rows chunk by chunk. No value is read on the host:
    unused chunks change nothing."""
    if steps.is_verified:
        verify_(out, state, steps, recurrence)
        return
    if steps.drafts is not None and not steps.is_single:
        replay_(state, steps, recurrence)
    num_tokens, num_single = len(out), _num_single(steps, out)
    saves = steps.save_slots if steps.chunks is None else steps.chunks[:, 3]
    for first in range(0, num_single, ROWS):
        rows = slice(first, min(first + ROWS, num_single))
        slots, begins = steps.slots[rows].long(), steps.seen_positions[rows] == 0
        current = torch.where(begins.view(-1, *(1,) * (state.dim() - 1)), 0.0, state.index_select(0, slots))
        out[rows], current = recurrence.step(rows, current)
        state.index_copy_(0, slots, current)
        if saves is not None:
            state.index_copy_(0, torch.where(saves[rows] < 0, slots, saves[rows].long()), current)
    if steps.chunks is None:
        return
    last = num_single + max_chunks(num_tokens - num_single, len(steps.slots) - num_single)
    rows_of, firsts, counts, saved = steps.chunks[num_single:last].long().unbind(1)
    used, rows_of = rows_of >= 0, rows_of.clamp(min=0)
    slots = steps.slots.long()[rows_of]
    saved = torch.where(used & (saved >= 0), saved, slots)
    starts = (steps.seen_positions[rows_of] == 0) & (firsts == steps.starts[rows_of])
    offset = torch.arange(min(STATE_CHUNK, num_tokens), device=out.device)
    later = offset[:, None] < offset
    for entry in range(len(rows_of)):
        inside = used[entry] & (offset < counts[entry])
        tokens = (firsts[entry] + offset).clamp(0, num_tokens - 1)
        slot = slots[entry : entry + 1]
        old = state.index_select(0, slot)[0]
        made, new = chunk(_Chunk(tokens, inside, later), torch.where(starts[entry], 0.0, old))
        new = torch.where(used[entry], new, old)[None]
        state.index_copy_(0, slot, new)
        state.index_copy_(0, saved[entry : entry + 1], new)
        # zeros are added for offsets past the chunk's end, whose tokens belong to others
        out.index_add_(0, tokens, torch.where(inside.view(-1, *(1,) * (out.dim() - 1)), made, 0.0))


def _num_single(steps: RecurrentSteps, out: torch.Tensor) -> int:
    """Leading rows that are known to have one token. They have one chunk each. On a GPU a graph may replay the step
    with other counts, so host counts are not used there."""
    if steps.is_single:
        return len(steps.slots)
    is_known = not out.is_cuda and steps.covers(len(out))
    return int((steps.num_tokens == 1).argmin()) if is_known else 0
