"""Gated delta rule in plain torch, in float32 at least, in float64 when the input is float64.

For each value head, with state S [key dim, value dim], log decay g and write strength beta:

    S = exp(g) S
    S = S + k (beta (v - S^T k))^T
    o = scale S^T q

A chunk of several tokens has a closed form: the corrections of its tokens solve a triangular system (WY form), so a
chunk takes a few matrix products and the state passes once per chunk. A token that the state has seen has g = 0 and
beta = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from slipstream.contracts.cache_spec import STATE_CHUNK
from slipstream.device.streams import execute_in_parallel
from slipstream.ops.elementwise.reference import gated_rms_norm
from slipstream.ops.gemm.linear import linear
from slipstream.ops.recurrent.replay import (
    Recurrence,
    causal_conv1d,
    convolve_ring,
    remember_,
    replay_,
    verify_,
)
from slipstream.ops.recurrent.steps import RecurrentSteps, max_chunks, seen_tokens

L2_EPS = 1e-6


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g and write strength beta [T, value heads], in the dtype of a_log (float32 or float64).

    a, b [T, value heads] are projections of the token; a_log, dt_bias [value heads].
    """
    wide = a_log.dtype
    return -a_log.exp() * F.softplus(a.to(wide) + dt_bias), b.to(wide).sigmoid()


def gated_delta_rule(
    q: torch.Tensor,  # [T, key heads, key dim]
    k: torch.Tensor,
    v: torch.Tensor,  # [T, value heads, value dim]
    g: torch.Tensor,  # [T, value heads] log decay, at most 0
    beta: torch.Tensor,  # [T, value heads]
    state: torch.Tensor,  # [slots, value heads, key dim, value dim], float32 or float64
    steps: RecurrentSteps,
    scale: float,
    l2_norm_qk: bool = True,
    deferred: torch.Tensor | None = None,  # of kernels: updates that states have not seen, see `delta_decode`
) -> torch.Tensor:
    """[T, value heads, value dim]. Each key head serves value heads / key heads neighbours.

    A row whose state has seen no token starts from zeros, whatever its slot holds. The new states go to the rows'
    slots, and the states at the ends of chunks with a save to the save slots. Tokens of no row get zeros.
    """
    assert deferred is None, "only kernels defer stores"
    is_seen = seen_tokens(steps, len(v))[:, None]
    g, beta = (torch.where(is_seen, 0.0, gate) for gate in (g, beta))
    inputs = _widen(q, k, v, g, beta, state.dtype, scale, l2_norm_qk)
    out = torch.zeros(v.shape, dtype=state.dtype, device=v.device)
    num_single = _num_single(steps, len(v))
    saves = steps.save_slots if steps.chunks is None else steps.chunks[:, 3]
    for first in range(0, num_single, _ROWS):
        rows = slice(first, min(first + _ROWS, num_single))
        slots, begins = steps.slots[rows].long(), steps.seen_positions[rows] == 0
        out[rows] = _recurrent(inputs.of(rows), state, slots, begins, None if saves is None else saves[rows])
    if steps.chunks is not None:
        last = num_single + max_chunks(len(v) - num_single, len(steps.slots) - num_single)
        for first in range(num_single, last, _BLOCK):
            _chunked(inputs, state, steps, slice(first, min(first + _BLOCK, last)), out)
    return out.to(v.dtype)


def _widen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    wide: torch.dtype,
    scale: float,
    l2_norm_qk: bool = True,
) -> _Inputs:
    """The inputs of `gated_delta_rule` in the state's dtype, normed, scaled and repeated for all value heads."""
    q, k = q.to(wide), k.to(wide)
    if l2_norm_qk:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    repeats = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeats, 1, output_size=v.shape[1]) for x in (q * scale, k))
    return _Inputs(q, k, v.to(wide), g.to(wide), beta.to(wide))


class _Inputs(NamedTuple):
    """Per token and value head. Queries are scaled."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def of(self, tokens: slice) -> _Inputs:
        return _Inputs(*(x[tokens] for x in self))


def _num_single(steps: RecurrentSteps, num_tokens: int) -> int:
    """Leading rows that are known to have one token. They have one chunk each."""
    if steps.is_single:
        return len(steps.slots)
    return int((steps.num_tokens == 1).argmin()) if steps.covers(num_tokens) else 0


def _recurrent(
    inputs: _Inputs, state: torch.Tensor, slots: torch.Tensor, begins: torch.Tensor, saves: torch.Tensor | None
) -> torch.Tensor:
    """One token for each of `slots`."""
    current = _change(inputs, torch.where(begins[:, None, None, None], 0.0, state.index_select(0, slots)))
    state.index_copy_(0, slots, current)
    if saves is not None:
        state.index_copy_(0, torch.where(saves < 0, slots, saves.long()), current)
    return _read(inputs, current)


def _change(inputs: _Inputs, current: torch.Tensor) -> torch.Tensor:
    """The states [n, value heads, key dim, value dim] after one token each."""
    _, k, v, g, beta = inputs
    current = current * g.exp()[..., None, None]
    recalled = (k[..., None, :] @ current)[..., 0, :]
    current += k[..., None] * ((v - recalled) * beta[..., None])[..., None, :]
    return current


def _read(inputs: _Inputs, current: torch.Tensor) -> torch.Tensor:
    return (inputs.q[..., None, :] @ current)[..., 0, :]


_ROWS = 4  # rows of one token that are computed together: bounds the memory for copies of states
_BLOCK = 4  # chunks whose factors are computed together: bounds their memory


def _chunked(inputs: _Inputs, state: torch.Tensor, steps: RecurrentSteps, entries: slice, out: torch.Tensor) -> None:
    """Some chunks of the step, in order; writes their tokens of `out`. No value is read: unused chunks change nothing,
    and offsets of a chunk past its end compute zeros."""
    assert steps.chunks is not None
    num_tokens, device = len(out), out.device
    rows, first, count, saved = steps.chunks[entries].long().unbind(1)
    used, rows = rows >= 0, rows.clamp(min=0)
    offset = torch.arange(min(STATE_CHUNK, num_tokens), device=device)
    inside = used[:, None] & (offset < count[:, None])  # [chunks, offsets]
    tokens = (first[:, None] + offset).clamp(0, num_tokens - 1)

    def cut(x: torch.Tensor) -> torch.Tensor:
        """[T, heads, ...] to [chunks, heads, offsets, ...]."""
        found = x[tokens]
        return torch.where(inside.view(*inside.shape, *(1,) * (found.dim() - 2)), found, 0.0).transpose(1, 2)

    q, k, v, g, beta = map(cut, inputs)
    total = g.cumsum(-1)  # log decay from the chunk's start
    later = offset[:, None] < offset
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = (k * beta[..., None]) @ k.mT * between  # its diagonal is not read
    values, keys = (
        torch.linalg.solve_triangular(system, x * beta[..., None], upper=False, unitriangular=True)
        for x in (v, k * total.exp()[..., None])
    )
    scores = q @ k.mT * between
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    end_decay = total[..., -1].exp()[..., None, None]

    slots = steps.slots.long()[rows]
    saved = torch.where(used & (saved >= 0), saved, slots)
    begins = (steps.seen_positions[rows] == 0) & (first == steps.starts[rows])
    for entry in range(len(rows)):
        slot = slots[entry : entry + 1]
        old = state.index_select(0, slot)[0]
        current = torch.where(begins[entry], 0.0, old)
        new_values = values[entry] - keys[entry] @ current
        made = q[entry] @ current + scores[entry] @ new_values
        new = torch.where(used[entry], current * end_decay[entry] + k[entry].mT @ new_values, old)[None]
        state.index_copy_(0, slot, new)
        state.index_copy_(0, saved[entry : entry + 1], new)
        # zeros are added for offsets past the chunk's end, whose tokens belong to others
        made = torch.where(inside[entry, :, None, None], made.transpose(0, 1), 0.0)
        out.index_add_(0, tokens[entry], made)


class DeltaWeights(NamedTuple):
    """Weights that a layer applies between its projections."""

    conv: torch.Tensor  # [2 * key size + value size, width]
    a_log: torch.Tensor  # [value heads], float32 or float64
    dt_bias: torch.Tensor  # [value heads], as a_log
    norm: torch.Tensor  # [value dim]
    eps: float  # of the norm


def delta_decode(
    qkv: torch.Tensor,  # [B, 2 * key size + value size]
    z: torch.Tensor,  # [B, value heads * value dim]
    b: torch.Tensor,  # [B, value heads]
    a: torch.Tensor,  # [B, value heads]
    weights: DeltaWeights,
    conv_state: torch.Tensor,  # [slots, 2 * key size + value size, columns]
    state: torch.Tensor,  # [slots, value heads, key dim, value dim]
    steps: RecurrentSteps,
    replay: torch.Tensor | None = None,  # [rows, columns, 2 * value heads], with drafts: b and a by position
    # of kernels [rows, value heads, period - 1, numbers]: by position % period the update of a token, its key,
    # correction and sum of log decays. States are stored at the last position of each period only.
    deferred: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution, gates, gated delta rule and gated norm of one token per row: [B, value heads * value dim]."""
    assert deferred is None, "only kernels defer stores"
    mixed = causal_conv1d(qkv, weights.conv, None, conv_state, steps, "silu")
    if replay is not None and steps.is_verified:
        recurrence, inputs = _recurrence(weights, conv_state, state, replay, mixed, b, a)
        remember_(replay, steps, torch.cat((b, a), 1))
        out = torch.zeros(inputs.v.shape, dtype=state.dtype, device=state.device)
        verify_(out, state, steps, recurrence)
        out = out.to(qkv.dtype)
    else:
        q, k, v = _heads(mixed, state)
        g, beta = delta_gates(a, b, weights.a_log, weights.dt_bias)
        out = gated_delta_rule(q, k, v, g, beta, state, steps, state.shape[2] ** -0.5)
    return gated_rms_norm(out, z.unflatten(1, (-1, state.shape[3])), weights.norm, weights.eps).flatten(1)


def delta_replay_(
    state: torch.Tensor,
    conv_state: torch.Tensor,
    replay: torch.Tensor,
    weights: DeltaWeights,
    steps: RecurrentSteps,
) -> None:
    """Brings the state of each row up to its first position, before the convolution of a step without drafts writes to
    the rings. The arguments are those of `delta_decode`."""
    nothing = conv_state.new_zeros(0, conv_state.shape[1])
    gates = nothing[:, : state.shape[1]]
    replay_(state, steps, _recurrence(weights, conv_state, state, replay, nothing, gates, gates)[0])


def _recurrence(
    weights: DeltaWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    replay: torch.Tensor,
    mixed: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> tuple[Recurrence, _Inputs]:
    """The recurrence over tokens whose convolved q, k and v are `mixed`, and their inputs."""

    def widen(mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> _Inputs:
        g, beta = delta_gates(a, b, weights.a_log, weights.dt_bias)
        return _widen(*_heads(mixed, state), g, beta, state.dtype, state.shape[2] ** -0.5)

    def recall(slot: torch.Tensor, position: torch.Tensor) -> _Inputs:
        gates = replay[slot, position % replay.shape[1]]
        return widen(convolve_ring(weights.conv, None, conv_state, slot, position, "silu"), *gates.chunk(2, 1))

    inputs = widen(mixed, b, a)
    return Recurrence(inputs.of, recall, _change, lambda tokens, current: _read(inputs.of(tokens), current)), inputs


def _heads(mixed: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a convolution's output, by head."""
    num_heads, key_dim, value_dim = state.shape[1:]
    value_size = num_heads * value_dim
    key_size = (mixed.shape[1] - value_size) // 2
    q, k, v = mixed.split([key_size, key_size, value_size], 1)
    return q.unflatten(1, (-1, key_dim)), k.unflatten(1, (-1, key_dim)), v.unflatten(1, (-1, value_dim))


# Input projections of a delta net: one GEMM, or the small one for the gates on a second stream.
#
# The GEMM for b and a has half a percent of the outputs. Together with the large one it costs nothing unless its
# columns begin another wave of tiles.

TWO_STREAMS = range(33, 65)
"""Numbers of tokens for which two streams are used. Measured on the H200 at Qwen3-Next's width: 16.0 us for 48 and 64
tokens, 16.6 with one GEMM; for up to 32 tokens and from 96 on one GEMM is faster (benchmarks/gdn_projections.py)."""


def takes_two_streams(x: torch.Tensor) -> bool:
    return x.is_cuda and len(x) in TWO_STREAMS


def project_on_two_streams(
    x: torch.Tensor, main: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, inputs] times main [outputs, inputs] and gates [gate outputs, inputs]."""
    return execute_in_parallel(lambda: linear(x, main, None), lambda: linear(x, gates, None))
