"""Step inputs in plain torch. T tokens, B rows, G cache groups."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    held = tables.flatten(1).index_select(1, token_rows * tables.shape[2] + page_index)
    result = StepInputs(
        ids, positions, lengths, held.mul_(page_size).add_(in_page), tables[:, :, :width].index_select(1, rows)
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
