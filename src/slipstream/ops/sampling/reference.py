"""Sampling in plain torch: the CPU path and the oracle of the kernels.

R rows, V tokens in the vocabulary. Logits are float32 or float64, and all arithmetic is in their dtype. A trailing
underscore means in place.

The noise is defined in integers, so that all implementations give the same bits. All arithmetic wraps, all shifts are
logical. Once per admission, 64 bits (`mix64` below), computed on the host:

    row_key  = mix64(mix64(seed + G) + G * (sample + 1))

Once per row and step, 64 bits:

    step_key = mix64(row_key + G * (4 * position + purpose + 1))

Per token of the vocabulary, 32 bits; low and high are the halves of step_key:

    x = index + low
    x = (x ^ x >> 16) * 0x7FEB352D
    x = (x ^ x >> 15) ^ high
    x = x * 0x846CA68B
    x = (x ^ x >> 16) * 0x31848BAB
    x = x ^ x >> 14

Then u = (x + 0.5) * 2**-32, with x unsigned and rounded to the logits' dtype first, and u at most the largest number
below 1; E = -log1p(-u); the sampled token is argmax(logit - log E). The winner has a small E, and a small u keeps all
its bits in float32, so log1p instead of log matters for unlikely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# purposes: each has its own noise. Only DRAW is used: a draft is accepted if the row draws it
DRAW = 0
ACCEPT = 1
RESAMPLE = 2
DRAFT = 3

_U64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # G
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def _signed(value: int, bits: int) -> int:
    """The same bits as a signed two's complement number, as torch stores them."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN_S, _MIX_A_S, _MIX_B_S = (_signed(value, 64) for value in (_GOLDEN, _MIX_A, _MIX_B))
_HASH_A, _HASH_B, _HASH_C = (_signed(value, 32) for value in (0x7FEB352D, 0x846CA68B, 0x31848BAB))


def row_key(seed: int, sample: int) -> int:
    """Host: the key of an admission, a signed 64-bit number."""
    return _signed(_mix64(_mix64(seed + _GOLDEN) + _GOLDEN * (sample + 1)), 64)


def _mix64(z: int) -> int:
    z &= _U64
    z = ((z ^ z >> 30) * _MIX_A) & _U64
    z = ((z ^ z >> 27) * _MIX_B) & _U64
    return z ^ z >> 31


def step_keys(row_keys: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """[R] int64 row keys and [R] int64 positions to [R] int64 step keys."""
    z = row_keys + (positions * 4 + (purpose + 1)) * _GOLDEN_S
    z = (z ^ _shift64(z, 30)) * _MIX_A_S
    z = (z ^ _shift64(z, 27)) * _MIX_B_S
    return z ^ _shift64(z, 31)


def _shift64(z: torch.Tensor, by: int) -> torch.Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def noise_bits(keys: torch.Tensor, num: int) -> torch.Tensor:
    """[R] int64 step keys to [R, num] int32: 32 random bits per index."""
    low, high = _low_half(keys)[:, None], _low_half(keys >> 32)[:, None]
    x = torch.arange(num, dtype=torch.int32, device=keys.device) + low
    x = _fold_(x, 16).mul_(_HASH_A)
    x = _fold_(x, 15).bitwise_xor_(high).mul_(_HASH_B)
    x = _fold_(x, 16).mul_(_HASH_C)
    return _fold_(x, 14)


def _low_half(keys: torch.Tensor) -> torch.Tensor:
    """The low 32 bits as int32. A plain cast of a number out of range would be undefined."""
    return (((keys & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _fold_(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))


def uniform(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 bits, read as unsigned, to numbers in the open interval (0, 1); small numbers keep all their bits."""
    u = bits.view(torch.uint32).to(dtype)
    return u.add_(0.5).mul_(2.0**-32).clamp_(max=1 - torch.finfo(dtype).eps / 2)


IN_PROMPT, IN_OUTPUT = 1, 2
"""Flags of a token: it occurs in the row's prompt, in its output."""


class Penalty(NamedTuple):
    """The arguments of `penalize_`, for ops that apply penalties while they read logits. The logits do not change, and
    no copy of them is made in a wider dtype."""

    counts: torch.Tensor  # [entries, V] int32, occurrences of a token in the output
    seen: torch.Tensor  # [entries, V] uint8 flags
    entries: torch.Tensor  # [R] entry of the row's counts; negative: no penalty
    values: torch.Tensor  # [R, 3] repetition, presence, frequency
    earlier: torch.Tensor | None = None  # [R, K] int64 further tokens of the output, -1: none; None: no row has any


class TokenMask(NamedTuple):
    """The tokens that each row may draw, for ops that apply masks while they read logits."""

    bits: torch.Tensor  # [masks, words] int32: bit t % 32 of word t // 32 is token t
    entries: torch.Tensor  # [N] int32, as `mask_bits_` takes them
    index: torch.Tensor  # [R] int64, the index of each row in `entries`


class DrawTables(NamedTuple):
    """Keys, flags and limits of all rows, which a draw reads at its own rows."""

    keys: torch.Tensor  # [rows] int64 row keys
    is_random: torch.Tensor  # [rows] bool, whether the row is sampled with noise
    temperatures: torch.Tensor | None  # [rows], above 0; None: the logits are already scaled
    limits: torch.Tensor | None  # [rows, limits] as in `find_floor`; None: no row has limits


class RowHints(NamedTuple):
    """Knowledge of the host about the rows of a step that is not captured, so that an implementation in torch computes
    no more than they need. The tables say it too, so others ignore it."""

    random_rows: torch.Tensor | None  # [N] int64, those that are sampled with noise; None: all
    is_scaled: bool  # whether a temperature is not 1
    penalized_rows: torch.Tensor | None  # [N] int64; None: all, if there are penalties
    order: Sequence[tuple[torch.Tensor, int]]  # as `find_floor` takes it
    may_overwrite: bool  # nothing reads the logits after the draw


class Choice(NamedTuple):
    tokens: torch.Tensor  # [R] int64, 0 where failed
    failed: torch.Tensor  # [R] bool: the row holds NaN, or only -inf


def draw(
    logits: torch.Tensor,
    keys: torch.Tensor,  # [R] int64 step keys
    random: torch.Tensor | None = None,  # [R] bool, rows that are sampled with noise; None: all
    temperature: torch.Tensor | None = None,  # [R], above 0; None: the logits are already scaled
    limits: torch.Tensor | None = None,  # [R, limits] as in `find_floor`; None: dropped tokens are already -inf
    penalty: Penalty | None = None,
    mask: TokenMask | None = None,
) -> Choice:
    """Samples one token per row from the softmax of [R, V] logits. A token at -inf is never sampled."""
    if mask is not None:
        logits = masked(logits, mask)
    if penalty is not None:
        logits = _penalized(logits, penalty)
    if temperature is not None:
        logits = logits / temperature[:, None]
    if limits is not None:
        logits = logits.masked_fill(logits < find_floor(logits, limits, None)[:, None], -torch.inf)
    return argmax_rows(noisy(logits, keys, random))


def noisy(logits: torch.Tensor, keys: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """logits - log E, whose largest value is the sampled token's."""
    noise = uniform(noise_bits(keys, logits.shape[1]), logits.dtype)
    log_exponential = noise.neg_().log1p_().neg_().log_()
    if random is not None:
        log_exponential.masked_fill_(~random[:, None], 0)
    return torch.sub(logits, log_exponential, out=log_exponential)


def draw_by_row(
    logits: torch.Tensor,
    rows: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
    tables: DrawTables,
    penalty: Penalty | None = None,
    mask: TokenMask | None = None,
) -> Choice:
    """As `draw`, for these rows of the tables and their positions."""
    keys = step_keys(tables.keys.index_select(0, rows), positions, DRAW)
    limits = None if tables.limits is None else tables.limits.index_select(0, rows)
    temperature = None if tables.temperatures is None else tables.temperatures.index_select(0, rows)
    return draw(logits, keys, tables.is_random.index_select(0, rows), temperature, limits, penalty, mask)


def argmax_rows(logits: torch.Tensor, penalty: Penalty | None = None, mask: TokenMask | None = None) -> Choice:
    """[R, V] to [R] tokens: the first of equal maxima. `max` gives the same token as `argmax` and is faster on the
    CPU."""
    if mask is not None:
        logits = masked(logits, mask)
    if penalty is not None:
        logits = _penalized(logits, penalty)
    best, tokens = logits.max(-1)
    failed = (best > -torch.inf).logical_not_()  # true for NaN too
    return Choice(tokens.masked_fill_(failed, 0), failed)


def forbid_(logits: torch.Tensor, index: torch.Tensor | None, ids: torch.Tensor, active: torch.Tensor) -> None:
    """Sets logits[index[i], ids[i, j]] to -inf for active i. index [N], ids [N, J], active [N].

    Without an index, row i is i.
    """
    if index is None:
        index = torch.arange(len(ids), device=ids.device)
    items = (index[:, None], ids)
    logits.index_put_(items, logits[items].masked_fill_(active[:, None], -torch.inf))


def match_words(words: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """[R, W] bool: whether the next token would complete the word.

    words [R, W, L] are reversed, the last token first, and padded with -1. tail [R, L - 1 or more] holds the last
    tokens of the row, the newest first, padded with -1.
    """
    before = words[..., 1:]
    matches = (before == tail[:, None, : before.shape[2]]) | (before < 0)
    return matches.all(-1) & (words[..., 0] >= 0)


def forbid_matched_(logits: torch.Tensor, index: torch.Tensor | None, ids: torch.Tensor, matched: torch.Tensor) -> None:
    """Sets logits[index[i], ids[i, j]] to -inf where matched[i, j]. Ids may repeat, and may be -1 where not matched.

    Without an index, row i is i.
    """
    if index is None:
        index = torch.arange(len(ids), device=ids.device)
    change = torch.zeros_like(ids, dtype=logits.dtype).masked_fill_(matched, -torch.inf)
    # adds -inf: for an id that ends two words, the order of the writes does not matter
    logits.index_put_((index[:, None], ids.clamp(min=0)), change, accumulate=True)


def penalize_(
    logits: torch.Tensor,
    counts: torch.Tensor,  # [entries, V] int32, occurrences of a token in the output
    seen: torch.Tensor,  # [entries, V] uint8 flags
    entries: torch.Tensor,  # [R] entries of the rows' counts; negative: no penalty
    values: torch.Tensor,  # [R, 3] repetition, presence, frequency
    earlier: torch.Tensor | None = None,  # [R, K] further tokens of the output that are not counted yet; -1: none
) -> None:
    """Repetition penalty for tokens of prompt and output, then frequency and presence for tokens of the output."""
    own = penalized(logits, counts, seen, entries, values, earlier)
    logits.copy_(torch.where((entries >= 0)[:, None], own, logits))


def penalized(
    logits: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    entries: torch.Tensor,
    values: torch.Tensor,
    earlier: torch.Tensor | None,
) -> torch.Tensor:
    """`penalize_` for rows that have an entry, as a new tensor; the others are arbitrary."""
    entries = entries.clamp(min=0)
    repetition, presence, frequency = values[:, :, None].unbind(1)
    counts, flags = counts.index_select(0, entries), seen.index_select(0, entries)
    if earlier is not None:
        counts.scatter_add_(1, earlier.clamp(min=0), (earlier >= 0).to(counts.dtype))
        flags = flags | (counts > 0).to(flags.dtype) * IN_OUTPUT
    factor = torch.where(flags != 0, repetition, 1)
    own = torch.where(logits > 0, logits / factor, logits * factor)
    return own.sub_(frequency * counts).sub_(presence * (flags >= IN_OUTPUT))


def _penalized(logits: torch.Tensor, penalty: Penalty) -> torch.Tensor:
    own = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    penalize_(own, *penalty)
    return own


def count_(counts: torch.Tensor, seen: torch.Tensor, entries: torch.Tensor, tokens: torch.Tensor) -> None:
    """counts [entries, V] += 1 at (entries[i], tokens[i]) and sets the IN_OUTPUT flag, for every entries[i] >= 0."""
    items = entries.clamp(min=0) * counts.shape[1] + tokens
    counts.view(-1).index_add_(0, items, (entries >= 0).to(counts.dtype))
    # the written value depends only on the item, so a negative entry, clamped to 0, does no harm
    in_output = (counts.view(-1).index_select(0, items) > 0).to(seen.dtype) * IN_OUTPUT
    seen.view(-1).index_copy_(0, items, seen.view(-1).index_select(0, items) | in_output)


def add_entries_(logits: torch.Tensor, index: torch.Tensor | None, table: torch.Tensor, entries: torch.Tensor) -> None:
    """logits[index[i]] += table[entries[i]] for every entries[i] >= 0. table [entries, V], index and entries [N].

    Without an index, row i is i. With one, a row with a negative entry has no defined result.
    """
    added = table.index_select(0, entries.clamp(min=0)).to(logits.dtype)
    if index is not None:
        logits.index_add_(0, index, added)
    else:
        logits.copy_(torch.where((entries >= 0)[:, None], logits + added, logits))


def mask_bits_(logits: torch.Tensor, bits: torch.Tensor, entries: torch.Tensor) -> None:
    """Put -inf at the tokens whose bit is not set. bits [masks, words] int32: bit t % 32 of word t // 32 is token t.
    entries [R]: the mask of each row; -1: the row stays as it is; -2 - t: only token t stays."""
    logits.masked_fill_(_forbidden(bits, entries, logits.shape[1]), -torch.inf)


def masked(logits: torch.Tensor, mask: TokenMask) -> torch.Tensor:
    """A copy of the logits with -inf at forbidden tokens."""
    forbidden = _forbidden(mask.bits, mask.entries.index_select(0, mask.index), logits.shape[1])
    return logits.masked_fill(forbidden, -torch.inf)


def _forbidden(bits: torch.Tensor, entries: torch.Tensor, size: int) -> torch.Tensor:
    """[R, size] bool, see `mask_bits_`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    own = bits.index_select(0, entries.clamp(min=0))
    forbidden = ((own[:, :, None] >> shifts) & 1).flatten(1)[:, :size] == 0
    only = -2 - entries[:, None]
    other = (only != torch.arange(size, device=bits.device)) & (only >= 0)
    return torch.where(entries[:, None] < 0, other, forbidden)


def fetch_masks_(
    table: torch.Tensor,  # [entries, words] int32
    bits: torch.Tensor,  # [N, words] int32, in host memory
    targets: torch.Tensor,  # [N] int32, in host memory
    entries: torch.Tensor,  # [E] int32
    host_entries: torch.Tensor,  # [E] int32, in host memory
) -> None:
    """Copies each mask to its target in the table. A mask without a target, -1, is not needed: it may be copied to its
    own number. Equal targets have equal masks. Copies the entries, too."""
    entries.copy_(host_entries)
    targets = targets.to(table.device)
    own = torch.arange(len(targets), device=table.device)
    table.index_copy_(0, torch.where(targets < 0, own, targets), bits.to(table.device))


def find_floor(
    logits: torch.Tensor,
    limits: torch.Tensor,  # [R, 4] log of min_p, top_k, top_p, log of top_a; (-inf, >= V, > 1, -inf) keeps all
    # rows [N], and how many of their largest logits to sort; None: all rows, all logits
    order: Sequence[tuple[torch.Tensor, int]] | None,
    temperature: torch.Tensor | None = None,  # [R], above 0; None: the logits are already scaled
    penalty: Penalty | None = None,
) -> torch.Tensor:
    """[R] the smallest logit that min-p and top-a, then top-k, then top-p keep; -inf for a row that keeps all.

    `order` tells a sorting implementation how much to sort: the largest top_k of these rows, V for top-a and for top-p
    without top-k, 0 for min-p only. Rows that it does not name keep all. An implementation without a sort ignores it.
    """
    if penalty is not None:
        logits = _penalized(logits, penalty)
    if temperature is not None:
        logits = logits / temperature[:, None]
    if order is None:
        order = [(torch.arange(len(logits), device=logits.device), logits.shape[1])]
    floor = torch.full_like(logits[:, 0], -torch.inf)
    for index, num_sorted in order:
        log_min_p, top_k, top_p, log_top_a = limits.index_select(0, index).unbind(1)
        own = logits.index_select(0, index)
        if num_sorted == 0:
            found = min_p_floor(own.amax(-1), log_min_p)
        else:
            whole = num_sorted >= own.shape[1]
            ordered = own.sort(-1, descending=True).values if whole else own.topk(num_sorted, -1).values
            least = min_p_floor(ordered[:, 0], log_min_p)
            if whole:
                least = torch.maximum(least, top_a_floor(ordered, log_top_a))
            found = top_floor(ordered, least, top_k, top_p)
        floor.index_copy_(0, index, found)
    return floor


def min_p_floor(best: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """[R] largest logits to [R] smallest logits that min-p keeps. log_min_p = -inf keeps all."""
    return best + log_min_p


def top_a_floor(logits: torch.Tensor, log_top_a: torch.Tensor) -> torch.Tensor:
    """[R, V] logits to [R] smallest logits that top-a keeps: with probabilities of at least top_a times the square of
    the largest. log_top_a = -inf keeps all."""
    best = logits.amax(-1)
    return best + (log_top_a - (logits - best[:, None]).exp_().sum(-1).log_())


def top_floor(
    ordered: torch.Tensor,  # [R, K] the largest logits, descending; K >= each row's top_k, or V
    floor: torch.Tensor,  # [R] logits below it are already dropped
    top_k: torch.Tensor,  # [R] >= 1; >= K keeps all
    top_p: torch.Tensor,  # [R] > 1 keeps all, regardless of rounding
) -> torch.Tensor:
    """[R] the smallest logit that is kept.

    Top-p sums over exactly the top_k most likely tokens, so that the floor does not depend on K. Tokens that tie with
    the last kept one are kept too. At least one token is kept.
    """
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    candidate = (ranks < top_k[:, None]) & (ordered >= floor[:, None])
    weight = (ordered - ordered[:, :1]).exp_().masked_fill_(~candidate, 0)
    # the total is the last value of the cumulative sum: another reduction would round differently for another K
    total = weight.cumsum(-1)
    kept = candidate & (total - weight < top_p[:, None] * total[:, -1:])
    last = (kept.sum(-1) - 1).clamp_(min=0)
    return ordered.gather(1, last[:, None]).squeeze(1)


def drop_below_(logits: torch.Tensor, floor: torch.Tensor) -> None:
    """Sets logits below their row's floor to -inf. A floor of NaN drops nothing."""
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


class TopLogprobs(NamedTuple):
    chosen: torch.Tensor  # [R] logprobs of `tokens`
    rank: torch.Tensor  # [R] int64, 1 is the most likely; ties count as more likely
    top_ids: torch.Tensor  # [R, k] int64
    top: torch.Tensor  # [R, k] logprobs, descending


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> TopLogprobs:
    """Log-softmax at `tokens` and at the k most likely tokens, without a [R, V] tensor of logprobs."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    rank = (logits >= chosen).sum(-1)
    top, top_ids = logits.topk(k, -1)
    return TopLogprobs((chosen - total).squeeze(1), rank, top_ids, top - total)


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[R, V] logits and [R, J] ids to [R, J]: log-softmax at the ids."""
    return logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
