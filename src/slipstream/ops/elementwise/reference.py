"""RMS norm in plain torch, computed in float32, or in float64 for float64 inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / root mean square over the last dimension, times weight: [size], or [heads, size] for x [T, heads, size]."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum, which is the next residual."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def sum_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual [rows, size] + the sum of parts [num, rows, size], and the sum, which is the next residual.
    Parts may have a wider dtype than the residual."""
    total = (parts.sum(0) + residual).to(residual.dtype)
    return rms_norm(total, weight, eps), total


# Layer norm in plain torch, computed in float32, or in float64 for float64 inputs.


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / standard deviation over the last dimension, times weight, plus bias."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def layer_norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The norm of x + residual (post-norm: the sum is not needed)."""
    return F.layer_norm(x + residual, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum, which is the next residual (pre-norm)."""
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


# Gated norms in plain torch, in float32 at least, in float64 when the gate is float64.


def gated_group_norm(
    x: torch.Tensor,  # [T, size]
    gate: torch.Tensor,  # [T, size]
    weight: torch.Tensor | None,  # [size]
    eps: float,
    num_groups: int = 1,
    norm_first: bool = False,
) -> torch.Tensor:
    """weight * RMS norm of x * silu(gate) in groups of neighbours, or with `norm_first` silu(gate) * weight * RMS norm
    of x; of the gate's dtype. Without a weight there is no norm: x * silu(gate)."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    x, opened = x.to(wide), F.silu(gate.to(wide))
    if weight is None:
        return (x * opened).to(gate.dtype)
    if not norm_first:
        x = x * opened
    grouped = x.unflatten(1, (num_groups, -1))
    x = F.rms_norm(grouped, grouped.shape[2:], None, eps).flatten(1) * weight.to(wide)
    return (x * opened if norm_first else x).to(gate.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of x [T, heads, dim] along the last dimension, times weight [dim] and silu(gate); of the gate's dtype.

    gate [T, heads, dim].
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    normed = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    return (normed * F.silu(gate.to(wide))).to(gate.dtype)


# Activations in plain torch. The last dimension of the input of gated ones is [gate, up].


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, tanh approximation."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, exact (erf)."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate).mul_(up)


def quick_gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gelu, sigmoid approximation: gate * sigmoid(1.702 gate)."""
    gate, up = gate_up.chunk(2, -1)
    return torch.sigmoid(1.702 * gate).mul_(gate).mul_(up)


def relu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.relu(gate).mul_(up)


def sparse_gelu_tanh_and_mul(gate_up: torch.Tensor, deviations: float) -> torch.Tensor:
    """Gelu, tanh approximation, of what a gate exceeds the cutoff of its row by. The cutoff is the mean of the row's
    gates plus so many standard deviations."""
    gate, up = gate_up.chunk(2, -1)
    cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * deviations
    return F.gelu(F.relu(gate - cutoff), approximate="tanh").mul_(up)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """The square of ReLU, of each number by itself."""
    return F.relu(x).square_()


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x times sigmoid(gate), in place, both [rows, size]."""
    return x.mul_(torch.sigmoid(gate))


# Step inputs in plain torch. T tokens, B rows, G cache groups.


class StepRows(NamedTuple):
    """The part of a step's inputs that the host knows."""

    rows: torch.Tensor  # [B] int64
    counts: torch.Tensor | None = None  # [B] int64, tokens per row, 0 for padding; None: one token per row
    token_rows: torch.Tensor | None = None  # [T] int64; None: one token per row
    offsets: torch.Tensor | None = None  # [T] int64, index within the row's tokens; None: all 0
    # [T] int64 token ids; -1: the token drawn last, -2: the first draft after it, -3: the second; None: all -1
    host_ids: torch.Tensor | None = None


class StepInputs(NamedTuple):
    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    lengths: torch.Tensor  # [B] int64, length of each row after the step
    slots: torch.Tensor  # [G, T] int64, page * page_size + position in the page
    pages: torch.Tensor  # [G, B, width] int64


MAX_ADVANCED_DRAFTS = 128
"""Tokens of a step with drafts in which `gather_inputs` can advance the rows: one program of the kernel then reads and
writes the length of a drafted row."""


class KeptTokens(NamedTuple):
    """The pages in which a step stores the token ids of its positions, for drafters that search them."""

    tokens: torch.Tensor  # [pages, page size] int32
    group: int  # cache group whose slots they have; -1: no group has slots, and each row has its own pages
    row_size: int  # positions of a row, without a group; the first page is for padding


def gather_inputs(
    computed: torch.Tensor,  # [rows] int64, positions in the cache; the last row is for padding
    next_tokens: torch.Tensor,  # [rows, 1 + drafts] int64: the token drawn last, then drafts; -1: no draft
    tables: torch.Tensor,  # [G, rows, pages per row] int64
    page_size: int,
    width: int,  # pages per row to return
    step: StepRows,
    out: StepInputs | None = None,  # written in place if given; columns of its pages beyond `width` are not written
    kept: KeptTokens | None = None,  # gets the ids of the step
    *,
    # Makes `computed` the length after the step, in a step of one token per row. Of the positions of a drafted row one
    # counts, no matter which: its length is set again when drafts are accepted. With more than MAX_ADVANCED_DRAFTS
    # tokens all rows differ, but for the padding row.
    advance: bool = False,
) -> StepInputs:
    rows, counts, token_rows, offsets, host_ids = step
    if token_rows is None:
        token_rows = rows
    positions = computed.index_select(0, token_rows)
    if offsets is not None:
        positions += offsets
    if host_ids is None:
        ids = next_tokens[:, 0].index_select(0, token_rows)
    else:
        own = next_tokens.view(-1).index_select(0, token_rows * next_tokens.shape[1] + (-1 - host_ids).clamp_(min=0))
        ids = torch.where(host_ids >= 0, host_ids, own.clamp_(min=0))
    if counts is not None:
        lengths = computed.index_select(0, rows) + counts
    elif offsets is None and token_rows is rows:
        lengths = positions + 1
    else:
        lengths = computed.index_select(0, rows) + 1
    page_index = positions // page_size
    in_page = positions - page_index * page_size
    cached = tables.flatten(1).index_select(1, token_rows * tables.shape[2] + page_index)
    result = StepInputs(
        ids, positions, lengths, cached.mul_(page_size).add_(in_page), tables[:, :, :width].index_select(1, rows)
    )
    if kept is not None:
        keep_ids_(kept, result, token_rows)
    if advance:
        computed.index_copy_(0, rows, lengths)
    if out is None:
        return result
    for target, source in zip(out[:4], result[:4], strict=True):
        target.copy_(source)
    out.pages[:, :, :width].copy_(result.pages)
    return out


def keep_ids_(kept: KeptTokens, inputs: StepInputs, token_rows: torch.Tensor) -> None:
    """Stores the ids of a step."""
    tokens, group, row_size = kept
    at = inputs.slots[group] if group >= 0 else tokens.shape[1] + token_rows * row_size + inputs.positions
    tokens.view(-1).index_copy_(0, at, inputs.ids.to(tokens.dtype))


# Both lookups in plain torch.


def lookup_embedding_and_rope(
    embedding: torch.Tensor,  # [vocabulary, size]
    ids: torch.Tensor,  # [T] int64
    scale: float,
    angles: torch.Tensor,  # [positions, 2, rotary dim]
    positions: torch.Tensor,  # [T] int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings times scale [T, size], and rows of the RoPE table [T, 2, rotary dim]."""
    x = embedding.index_select(0, ids)
    return x if scale == 1.0 else x * scale, angles.index_select(0, positions)


# Segment sum in plain torch.


def segment_sum(
    x: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums [N, C] of x [T, C] over tokens starts[n] to starts[n + 1], in float32 or wider; 0 for a row without tokens.

    `starts` [N + 1] is ascending; tokens from starts[N] on are padding. With `begins` [N], tokens of row n before
    begins[n] >= starts[n] are ignored. With `origins` [N], a token is multiplied by its position + 1, where origins[n]
    is the position of token starts[n]. A row's tokens are added in order, so the bits of its sum do not depend on the
    batch.
    """
    rows = rows_of_tokens(len(x), starts, begins)
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = x.to(dtype)
    if origins is not None:
        own = rows.clamp(max=len(origins) - 1)
        first = starts.index_select(0, own).to(torch.int64) - origins.index_select(0, own).to(torch.int64)
        ordinals = torch.arange(1, len(x) + 1, device=x.device) - first  # positions + 1
        x = x * ordinals.to(dtype).unsqueeze(1)
    sums = torch.zeros(len(starts), x.shape[1], dtype=dtype, device=x.device)  # the last row is for padding
    return sums.index_add_(0, rows, x)[:-1]


def rows_of_tokens(
    num_tokens: int, starts: torch.Tensor, begins: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """[T] row of each token from `first` on; the number of rows for padding and ignored tokens."""
    tokens = torch.arange(first, first + num_tokens, device=starts.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts, tokens, right=True) - 1
    if begins is None:
        return rows
    past = len(begins)
    own = begins.to(starts.dtype).index_select(0, rows.clamp(max=past - 1))
    return torch.where(tokens < own, past, rows)


# Segment maximum and sum in plain torch.


def segment_max_into(
    out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int, begins: torch.Tensor | None = None
) -> None:
    """out [N + 1, C] = maximum of out and x [T, C] over the tokens of each row, in place.

    Row n has tokens starts[n] to starts[n + 1], counted over the whole step; x holds the tokens of the step from
    `first` on. With `begins` [N], tokens of row n before begins[n] are ignored. The last row of `out` receives padding
    tokens and holds no result.
    """
    rows = rows_of_tokens(len(x), starts, begins, first)
    out.scatter_reduce_(0, rows.unsqueeze(1).expand_as(x), x.to(out.dtype), "amax")


def segment_add_into(out: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, first: int) -> None:
    """As `segment_max_into`, of sums. Tokens are added one after another, so parts and batch do not matter."""
    out.index_add_(0, rows_of_tokens(len(x), starts, None, first), x.to(out.dtype))
