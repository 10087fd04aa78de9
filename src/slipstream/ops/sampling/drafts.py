"""Drafts in plain torch.

A step samples S tokens, called draws. A row without drafts has one draw. A row with k drafts has k + 1 adjacent draws:
the first samples the token after the row's last token, the next one the token after the first draft, and so on. A draw
is *reached* if every token sampled before it in its row equals the draft that the next draw has read; its token is then
the token that the row would have sampled without drafts.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch


class DrawnTokens(NamedTuple):
    """The draws of a step and their tokens."""

    rows: torch.Tensor  # [S] int64
    offsets: torch.Tensor  # [S] int64, index of the draw within its row
    positions: torch.Tensor  # [S] int64, of the drawn token: the row's length up to this draw
    tokens: torch.Tensor  # [S] int64
    failed: torch.Tensor  # [S] bool: no token could be drawn


class Accepted(NamedTuple):
    tokens: torch.Tensor  # [S] int64, as drawn
    kept: torch.Tensor  # [S] bool: the token is accepted
    failed: torch.Tensor  # [S] bool: the draw was reached, and no token could be drawn


def accept_(
    next_tokens: torch.Tensor,  # [rows, 1 + drafts] int64: the token drawn last, then drafts; -1: no draft
    computed: torch.Tensor,  # [rows] int64, positions in the cache; the last row is for padding and keeps 0
    drawn: DrawnTokens,
    out: Accepted | None = None,  # written in place if given
) -> Accepted:
    """Accepts the tokens of all reached draws. Sets each row's next token to the last accepted token and its computed
    length to the positions before that token; a row without an accepted token does not change."""
    rows, offsets, positions, tokens, failed = drawn
    drafts = next_tokens.view(-1).index_select(0, rows * next_tokens.shape[1] + offsets)
    equal = (offsets == 0) | (tokens.roll(1) == drafts)
    ends = (~equal | failed).long()
    # number of ends from the row's first draw up to this one
    so_far = ends.cumsum(0)
    first = torch.arange(len(rows), device=rows.device) - offsets
    so_far = so_far - (so_far - ends).index_select(0, first)
    kept = so_far == 0
    last = last_kept(kept, offsets)
    reached_failed = failed & equal & (so_far == ends)
    # Other draws write to the padding row: its token is arbitrary, its length stays 0. Draws of padding may have the
    # position of another row.
    padding = len(computed) - 1
    target = torch.where(last, rows, padding)
    next_tokens[:, 0].index_copy_(0, target, tokens)
    computed.index_copy_(0, target, positions * (target != padding))
    accepted = Accepted(tokens, kept, reached_failed)
    return accepted if out is None else _put(out, accepted)


def store_drawn_(
    next_tokens: torch.Tensor,  # [rows, 1 + drafts] int64
    rows: torch.Tensor,  # [S] int64, of draws without drafts
    tokens: torch.Tensor,  # [S] int64
    failed: torch.Tensor,  # [S] bool
    out: tuple[torch.Tensor, torch.Tensor] | None = None,  # tokens and failed, written in place if given
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets each row's next token to the one that it drew. Returns tokens and failed."""
    next_tokens[:, 0].index_copy_(0, rows, tokens)
    return (tokens, failed) if out is None else _put(out, (tokens, failed))


_Tensors = TypeVar("_Tensors", bound=tuple[torch.Tensor, ...])


def _put(out: _Tensors, values: tuple[torch.Tensor, ...]) -> _Tensors:
    for target, value in zip(out, values, strict=True):
        target.copy_(value)
    return out


def last_kept(kept: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[S] bool: the last accepted draw of each row."""
    has_next = torch.cat([offsets[1:], offsets[:1] * 0]) > 0
    return kept & ~(has_next & kept.roll(-1))


def earlier_drafts(next_tokens: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[S, drafts] the drafts that each draw has read, in order; -1 for those after it."""
    own = next_tokens[:, 1:].index_select(0, rows)
    indices = torch.arange(own.shape[1], device=rows.device)
    return own.masked_fill_(indices >= offsets[:, None], -1)


class RowHistory(NamedTuple):
    """The tokens of rows: in pages, as keys and values are, and the token drawn last in `next_tokens`."""

    next_tokens: torch.Tensor  # [rows, 1 + drafts] int64
    computed: torch.Tensor  # [rows] int64, positions whose tokens are in pages
    table: torch.Tensor  # [rows, pages per row] int64; page 0: the tokens are not kept
    tokens: torch.Tensor  # [pages, page size] int32


class MatchRule(NamedTuple):
    shortest: int  # tokens that must match
    longest: int  # tokens that are compared
    reach: float  # drafts per matching token; infinity: as many as are asked for


def propose_from_history_(
    rows: torch.Tensor,  # [S] int64
    offsets: torch.Tensor | None,  # [S] int64; draws with another offset than 0 propose nothing; None: all are 0
    history: RowHistory,
    num_drafts: int,
    rule: MatchRule,
    max_length: int,  # at least the number of tokens of every row; only this implementation needs it
    out: torch.Tensor | None = None,  # [S, drafts] int64, also receives the drafts of draws that propose, if given
) -> None:
    """Writes drafts to `next_tokens`: the tokens after the longest earlier match of the row's last tokens, the newest
    of equally long matches. Where the match reaches the end of the row, the tokens between repeat. -1: no match."""
    next_tokens, computed, table, tokens = history
    page_size = tokens.shape[1]
    width = min(table.shape[1], -(-max_length // page_size))
    end = computed.index_select(0, rows)[:, None]  # position of the token drawn last
    pages = table[:, :width].index_select(0, rows)
    text = tokens.index_select(0, pages.flatten()).view(len(rows), -1)
    positions = torch.arange(text.shape[1], device=rows.device)
    text = text.masked_fill_((pages == 0)[..., None].expand(-1, -1, page_size).flatten(1), -1)
    newest = next_tokens[:, 0].index_select(0, rows)[:, None].to(text.dtype)
    text = torch.where(positions == end, newest, text)
    matched = torch.zeros_like(text)
    alive = positions < end
    for back in range(min(rule.longest, text.shape[1])):
        wanted = text.gather(1, (end - back).clamp_(min=0))
        own = torch.cat([text.new_full((len(rows), back), -1), text[:, : text.shape[1] - back]], 1)
        alive = alive & (own == wanted) & (wanted >= 0) & (end >= back)
        matched += alive
    score = torch.where(matched >= rule.shortest, matched.long() * 2**32 + positions, -1)
    best = score.amax(1, keepdim=True)
    length, last = best // 2**32, best % 2**32
    indices = torch.arange(num_drafts, device=rows.device)
    source = last + 1 + indices % (end - last).clamp_(min=1)
    drafts = text.gather(1, source.clamp_(max=text.shape[1] - 1)).long()
    drafts = torch.where((best >= 0) & (indices < length * rule.reach), drafts, -1)
    if out is not None:
        out.copy_(drafts)
    # other draws write to the padding row
    target = rows if offsets is None else torch.where(offsets == 0, rows, len(computed) - 1)
    next_tokens[:, 1 : 1 + num_drafts].index_copy_(0, target, drafts)
