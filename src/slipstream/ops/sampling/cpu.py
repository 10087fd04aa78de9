"""The draw on the CPU: the arithmetic of `reference.py`, for the rows that need it, and a C kernel for greedy rows."""

from __future__ import annotations

import torch

from slipstream.ops.platform import native
from slipstream.ops.sampling import reference
from slipstream.ops.sampling.reference import DRAW, Choice, DrawTables, Penalty, RowHints, TokenMask


def argmax_rows(
    logits: torch.Tensor, penalty: Penalty | None = None, mask: TokenMask | None = None, hints: RowHints | None = None
) -> Choice:
    if hints is not None:
        logits, _ = _edited(logits, penalty, mask, hints)
    elif penalty is not None or mask is not None:
        return reference.argmax_rows(logits, penalty, mask)
    if not native.serves(logits) or not logits.is_contiguous():
        return reference.argmax_rows(logits)
    library = native.library()
    assert library is not None
    num_rows, size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    failed = torch.empty(num_rows, dtype=torch.bool)
    library.slip_argmax(logits.data_ptr(), tokens.data_ptr(), failed.data_ptr(), num_rows, size)
    return Choice(tokens, failed)


def draw_by_row(
    logits: torch.Tensor,
    rows: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
    tables: DrawTables,
    penalty: Penalty | None = None,
    mask: TokenMask | None = None,
    hints: RowHints | None = None,
) -> Choice:
    if hints is None:
        return reference.draw_by_row(logits, rows, positions, tables, penalty, mask)
    logits, is_own = _edited(logits, penalty, mask, hints)
    if hints.is_scaled and tables.temperatures is not None:
        temperature = tables.temperatures.index_select(0, rows)[:, None]
        logits, is_own = logits.div_(temperature) if is_own else logits / temperature, True
    if tables.limits is not None:
        floor = reference.find_floor(logits, tables.limits.index_select(0, rows), hints.order)
        logits = logits if is_own else logits.clone()
        reference.drop_below_(logits, floor)
    keys = tables.keys.index_select(0, rows)
    keys, index = reference.step_keys(keys, positions, DRAW), hints.random_rows
    if index is None:
        return argmax_rows(reference.noisy(logits, keys))
    choice = argmax_rows(logits)
    some = reference.noisy(logits.index_select(0, index), keys.index_select(0, index))
    choice.tokens.index_copy_(0, index, argmax_rows(some).tokens)
    return choice


def _edited(
    logits: torch.Tensor, penalty: Penalty | None, mask: TokenMask | None, hints: RowHints
) -> tuple[torch.Tensor, bool]:
    """The logits that rows choose from, and whether they may be overwritten."""
    is_own = hints.may_overwrite
    if mask is not None:
        logits, is_own = logits if is_own else logits.clone(), True
        reference.mask_bits_(logits, mask.bits, mask.entries.index_select(0, mask.index))
    if penalty is None:
        return logits, is_own
    index = hints.penalized_rows
    if index is None:
        return reference.penalized(logits, *penalty), True
    counts, seen, *of_rows = penalty
    entries, *few = [None if each is None else each.index_select(0, index) for each in of_rows]
    assert entries is not None
    some = reference.penalized(logits.index_select(0, index), counts, seen, entries, *few)
    return (logits if is_own else logits.clone()).index_copy_(0, index, some), True
