"""Sampling in plain torch: the CPU path, and the oracle of any kernel that does the same.

R rows, V tokens of vocabulary. Logits are float32 or float64 and everything is computed in their dtype.
A trailing underscore means in place.

The noise is a recipe in integers, to be followed bit for bit. All arithmetic wraps, all shifts are logical.
Once per admission, 64 bits (`mix64` below), made on the host:

    row_key  = mix64(mix64(seed + G) + G * (sample + 1))

Once per row and step, 64 bits:

    step_key = mix64(row_key + G * (4 * position + purpose + 1))

Per token of the vocabulary, 32 bits, low and high being the halves of step_key:

    x = index + low
    x = (x ^ x >> 16) * 0x7FEB352D
    x = (x ^ x >> 15) ^ high
    x = x * 0x846CA68B
    x = (x ^ x >> 16) * 0x31848BAB
    x = x ^ x >> 14

Then u = (x + 0.5) * 2**-32 with x read as unsigned and rounded to the logits' dtype first, no more than the largest
number under 1, E = -log1p(-u), and the token drawn is argmax(logit - log E). The winner has a small E,
and a small u keeps all its bits in float32, so the choice of log1p over log matters for unlikely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# purposes: noise for one never meets noise for another
DRAW = 0
ACCEPT = 1
RESAMPLE = 2
DRAFT = 3

_U64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # G
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def _signed(value: int, bits: int) -> int:
    """The same bits as a two's complement number, which is what torch's integers are."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN_S, _MIX_A_S, _MIX_B_S = (_signed(value, 64) for value in (_GOLDEN, _MIX_A, _MIX_B))
_HASH_A, _HASH_B, _HASH_C = (_signed(value, 32) for value in (0x7FEB352D, 0x846CA68B, 0x31848BAB))


def row_key(seed: int, sample: int) -> int:
    """Host: the part of the noise that an admission settles. A signed 64-bit number."""
    return _signed(_mix64(_mix64(seed + _GOLDEN) + _GOLDEN * (sample + 1)), 64)


def _mix64(z: int) -> int:
    z &= _U64
    z = ((z ^ z >> 30) * _MIX_A) & _U64
    z = ((z ^ z >> 27) * _MIX_B) & _U64
    return z ^ z >> 31


def step_keys(row_keys: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """[R] int64 keys of rows and [R] int64 positions to [R] int64 keys of this step."""
    z = row_keys + (positions * 4 + (purpose + 1)) * _GOLDEN_S
    z = (z ^ _shift64(z, 30)) * _MIX_A_S
    z = (z ^ _shift64(z, 27)) * _MIX_B_S
    return z ^ _shift64(z, 31)


def _shift64(z: torch.Tensor, by: int) -> torch.Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def noise_bits(keys: torch.Tensor, num: int) -> torch.Tensor:
    """[R] int64 step keys to [R, num] int32: 32 random bits for each index."""
    low, high = _low_half(keys)[:, None], _low_half(keys >> 32)[:, None]
    x = torch.arange(num, dtype=torch.int32, device=keys.device) + low
    x = _fold_(x, 16).mul_(_HASH_A)
    x = _fold_(x, 15).bitwise_xor_(high).mul_(_HASH_B)
    x = _fold_(x, 16).mul_(_HASH_C)
    return _fold_(x, 14)


def _low_half(keys: torch.Tensor) -> torch.Tensor:
    """The low 32 bits as int32, without leaving to the cast what happens to a number out of range."""
    return (((keys & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _fold_(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))


def uniform(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 bits, read as unsigned, to numbers over 0 and under 1; the small ones keep all their bits."""
    u = bits.view(torch.uint32).to(dtype)
    return u.add_(0.5).mul_(2.0**-32).clamp_(max=1 - torch.finfo(dtype).eps / 2)


IN_PROMPT, IN_OUTPUT = 1, 2
"""Flags of a token that a row has seen."""


class Penalty(NamedTuple):
    """What `penalize_` takes, for those who read logits as it would leave them. They are not changed, and no copy of
    them is made in a wider dtype."""

    counts: torch.Tensor  # [slots, V] int32, how often a token is in the output
    seen: torch.Tensor  # [slots, V] uint8, of flags
    slots: torch.Tensor  # [R] where a row has its counts; negative: the row stays as it is
    values: torch.Tensor  # [R, 3] repetition, presence, frequency


class Choice(NamedTuple):
    tokens: torch.Tensor  # [R] int64, 0 where failed
    failed: torch.Tensor  # [R] bool: the row holds NaN, or nothing but -inf


def draw(
    logits: torch.Tensor,
    keys: torch.Tensor,  # [R] int64 step keys
    random: torch.Tensor | None = None,  # [R] bool, rows that get noise; None: all
    temperature: torch.Tensor | None = None,  # [R], over 0; None: the logits are scaled already
    limits: torch.Tensor | None = None,  # [R, 3] as `find_floor` has them; None: what they drop is -inf already
    penalty: Penalty | None = None,
) -> Choice:
    """[R, V] logits to [R] tokens, each with its softmax probability. A token at -inf is never drawn."""
    if penalty is not None:
        logits = _penalized(logits, penalty)
    if temperature is not None:
        logits = logits / temperature[:, None]
    if limits is not None:
        logits = logits.masked_fill(logits < find_floor(logits, limits, None)[:, None], -torch.inf)
    noise = uniform(noise_bits(keys, logits.shape[1]), logits.dtype)
    gumbel = noise.neg_().log1p_().neg_().log_().neg_()
    if random is not None:
        gumbel.masked_fill_(~random[:, None], 0)
    return argmax_rows(gumbel.add_(logits))


def argmax_rows(logits: torch.Tensor, penalty: Penalty | None = None) -> Choice:
    """[R, V] to [R] tokens: the first of the largest. `max` says the same as `argmax` and is faster on the CPU."""
    if penalty is not None:
        logits = _penalized(logits, penalty)
    best, tokens = logits.max(-1)
    failed = (best > -torch.inf).logical_not_()  # NaN is not greater either
    return Choice(tokens.masked_fill_(failed, 0), failed)


def forbid_(logits: torch.Tensor, index: torch.Tensor | None, ids: torch.Tensor, active: torch.Tensor) -> None:
    """Put -inf at logits[index[i], ids[i, j]] for those i that are active. index [N], ids [N, J], active [N].

    Without an index the rows are all of them, in order.
    """
    if index is None:
        index = torch.arange(len(ids), device=ids.device)
    places = (index[:, None], ids)
    logits.index_put_(places, logits[places].masked_fill_(active[:, None], -torch.inf))


def match_words(words: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """[R, W] bool: whether the word's last token would complete it now.

    words [R, W, L] are written backwards, the last token first, and padded with -1. tail [R, at least L - 1] holds
    the row's tokens likewise, the newest first, padded with -1 too, which no token is.
    """
    before = words[..., 1:]
    met = (before == tail[:, None, : before.shape[2]]) | (before < 0)
    return met.all(-1) & (words[..., 0] >= 0)


def forbid_matched_(logits: torch.Tensor, index: torch.Tensor, ids: torch.Tensor, matched: torch.Tensor) -> None:
    """Put -inf at logits[index[i], ids[i, j]] where matched[i, j]. An id may come twice, or be -1 where not."""
    change = torch.zeros_like(ids, dtype=logits.dtype).masked_fill_(matched, -torch.inf)
    # added, so that an id that two words end with does not depend on which of them comes last
    logits.index_put_((index[:, None], ids.clamp(min=0)), change, accumulate=True)


def penalize_(
    logits: torch.Tensor,
    index: torch.Tensor | None,  # [N] which rows of the logits; None: all of them, in order
    counts: torch.Tensor,  # [slots, V] int32, how often a token is in the output
    seen: torch.Tensor,  # [slots, V] uint8, of flags
    slots: torch.Tensor,  # [N] where these rows have their counts; negative, without an index: the row stays as it is
    values: torch.Tensor,  # [N, 3] repetition, presence, frequency
) -> None:
    """Repetition for tokens of prompt and output, then frequency and presence for those of the output."""
    repetition, presence, frequency = values[:, :, None].unbind(1)
    held = slots if index is not None else slots.clamp(min=0)
    before, counts = logits if index is None else logits.index_select(0, index), counts.index_select(0, held)
    flags = seen.index_select(0, held)
    factor = torch.where(flags != 0, repetition, 1)
    own = torch.where(before > 0, before / factor, before * factor)
    own.sub_(frequency * counts).sub_(presence * (flags >= IN_OUTPUT))
    if index is None:
        logits.copy_(torch.where((slots >= 0)[:, None], own, before))
    else:
        logits.index_copy_(0, index, own)


def _penalized(logits: torch.Tensor, penalty: Penalty) -> torch.Tensor:
    own = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    penalize_(own, None, *penalty)
    return own


def count_(counts: torch.Tensor, seen: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """counts [slots, V] += 1 at (slots[i], tokens[i]), and seen flagged, for those i whose slot is not negative."""
    places = slots.clamp(min=0) * counts.shape[1] + tokens
    counts.view(-1).index_add_(0, places, (slots >= 0).to(counts.dtype))
    # what is written follows from the place alone, also where a negative slot names another's
    in_output = (counts.view(-1).index_select(0, places) > 0).to(seen.dtype) * IN_OUTPUT
    seen.view(-1).index_copy_(0, places, seen.view(-1).index_select(0, places) | in_output)


def add_lines_(logits: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> None:
    """logits[i] += table[slots[i]], for those i whose slot is not negative. table [slots, V], slots [R]."""
    lines = table.index_select(0, slots.clamp(min=0)).to(logits.dtype)
    logits.copy_(torch.where((slots >= 0)[:, None], logits + lines, logits))


def find_floor(
    logits: torch.Tensor,
    limits: torch.Tensor,  # [R, 3] log of min_p, top_k, top_p; (-inf, V or more, over 1) keeps all
    # index [N] of rows, and how many of their largest to put in order; None: all rows, all of their logits
    order: Sequence[tuple[torch.Tensor, int]] | None,
    temperature: torch.Tensor | None = None,  # [R], over 0; None: the logits are scaled already
    penalty: Penalty | None = None,
) -> torch.Tensor:
    """[R] smallest logits that min-p, then top-k, then top-p keep; -inf for a row of which all stay.

    `order` is the host's help for a sort: the most a top_k of these rows asks for, V for top-p without top-k, 0 for
    min-p alone. Rows it does not name keep all. A version that needs no sort goes by the limits and ignores it.
    """
    if penalty is not None:
        logits = _penalized(logits, penalty)
    if temperature is not None:
        logits = logits / temperature[:, None]
    if order is None:
        order = [(torch.arange(len(logits), device=logits.device), logits.shape[1])]
    floor = torch.full_like(logits[:, 0], -torch.inf)
    for index, most in order:
        log_min_p, top_k, top_p = limits.index_select(0, index).unbind(1)
        own = logits.index_select(0, index)
        if most == 0:
            found = min_p_floor(own.amax(-1), log_min_p)
        else:
            whole = most >= own.shape[1]
            ordered = own.sort(-1, descending=True).values if whole else own.topk(most, -1).values
            found = top_floor(ordered, min_p_floor(ordered[:, 0], log_min_p), top_k, top_p)
        floor.index_copy_(0, index, found)
    return floor


def min_p_floor(best: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """[R] largest logits to [R] smallest logits that min-p keeps. A log of -inf keeps all."""
    return best + log_min_p


def top_floor(
    ordered: torch.Tensor,  # [R, K] the largest logits in falling order; K is at least each row's top_k, or V
    floor: torch.Tensor,  # [R] logits under this are out already
    top_k: torch.Tensor,  # [R] at least 1; K or more keeps all
    top_p: torch.Tensor,  # [R] over 1 keeps all, whatever the rounding of the sum
) -> torch.Tensor:
    """[R] smallest logits that stay.

    Top-p sums over exactly the top_k likeliest, so that a row gets the same floor for every K. Tokens that tie with
    the last one kept stay too. One token always stays.
    """
    places = torch.arange(ordered.shape[1], device=ordered.device)
    candidate = (places < top_k[:, None]) & (ordered >= floor[:, None])
    weight = (ordered - ordered[:, :1]).exp_().masked_fill_(~candidate, 0)
    # the total is the sum's own last value: another reduction would round differently with another K
    total = weight.cumsum(-1)
    kept = candidate & (total - weight < top_p[:, None] * total[:, -1:])
    last = (kept.sum(-1) - 1).clamp_(min=0)
    return ordered.gather(1, last[:, None]).squeeze(1)


def drop_below_(logits: torch.Tensor, floor: torch.Tensor) -> None:
    """Put -inf at logits under their row's floor. A floor that is not a number drops nothing."""
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


class TopLogprobs(NamedTuple):
    chosen: torch.Tensor  # [R] of the given tokens
    rank: torch.Tensor  # [R] int64, 1 is the likeliest; ties count as likelier
    top_ids: torch.Tensor  # [R, k] int64
    top: torch.Tensor  # [R, k] falling


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> TopLogprobs:
    """Log-softmax of the logits at the tokens and at the k likeliest, without a [R, V] tensor of logprobs."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    rank = (logits >= chosen).sum(-1)
    top, top_ids = logits.topk(k, -1)
    return TopLogprobs((chosen - total).squeeze(1), rank, top_ids, top - total)


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[R, V] and ids [R, J] to [R, J]: log-softmax at these ids."""
    return logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
