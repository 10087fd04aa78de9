"""The pooling methods on a step's hidden states: a line for each prompt, or the lines of its tokens.

A method but LAST is made of a kept line (`KeptLine`): the first token, the sum, the sum weighted by position, or the
largest of each number. Lines of chunks can be joined, so a prompt may be cut anywhere. All that decides which lines are
taken is known to the host; where it takes all rows of a step, the device reads it from the step's own starts, so that
the work can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.config.pooling_info import KeptLine, Method, kept_lines
from slipstream.nn.context import BatchView
from slipstream.ops.segment_max import segment_max_into
from slipstream.ops.segment_sum import segment_sum
from slipstream.runner.batch.staging import Upload

Longs = np.ndarray[Any, np.dtype[np.int64]]
Lines = Callable[[torch.Tensor], torch.Tensor]
"""Device: hidden states [T, hidden] to some of their lines."""


def pool_all(
    methods: tuple[Method, ...], view: BatchView, hidden: torch.Tensor, skipped: torch.Tensor | None = None
) -> torch.Tensor:
    """Device: one line for each row of a step, all of whose prompts are in it whole. Rows that pad give anything.

    `skipped` [at most B]: so many tokens at the beginning of each row do not count.
    """
    if view.query_starts is None and skipped is None:  # one token a row, which is all of these
        return hidden if len(methods) == 1 else torch.cat([hidden] * len(methods), 1)
    starts = starts_of(view, hidden)
    begins = None if skipped is None else begins_of(starts, skipped)
    kept: dict[KeptLine, torch.Tensor] = {}
    if "first" in methods:
        first = starts[:-1]
        if begins is not None:  # a row of skipped tokens alone has its first
            first = torch.where(begins < starts[1:], begins, first)
        kept["first"] = hidden.index_select(0, first.clamp(max=len(hidden) - 1))
    for kind in kept_lines(methods):
        if kind != "first":
            kept[kind] = line_of_rows(kind, view, hidden, starts, begins)
    last = hidden.index_select(0, (starts[1:] - 1).clamp_(min=0)) if "last" in methods else None
    counted = None
    if skipped is not None:
        counted = torch.zeros(len(starts) - 1, dtype=skipped.dtype, device=skipped.device)
        counted[: len(skipped)] = skipped
    return finish_lines(methods, kept, last, view.lengths, counted)


def line_of_rows(
    kind: KeptLine, view: BatchView, hidden: torch.Tensor, starts: torch.Tensor, begins: torch.Tensor | None
) -> torch.Tensor:
    """Device: of each row's tokens in this step, in float32 at least [B, hidden]. Not of kind first."""
    if kind == "max":
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        most = torch.full((len(starts), hidden.shape[1]), -torch.inf, dtype=dtype, device=hidden.device)
        segment_max_into(most, hidden, starts, 0, begins)
        return most[:-1]
    origins = None
    if kind == "weighted":
        origins = view.lengths - (starts[1:] - starts[:-1])  # the position of each row's first token in the step
    return segment_sum(hidden, starts, begins, origins)


def finish_lines(
    methods: tuple[Method, ...],
    kept: Mapping[KeptLine, torch.Tensor],
    last: torch.Tensor | None,
    lengths: torch.Tensor,
    skipped: torch.Tensor | None,
) -> torch.Tensor:
    """Device: kept lines of whole prompts [N, hidden] to what the methods make of them, side by side.

    `lengths` [N] are the prompts', of which the first `skipped` [N] tokens did not count.
    """
    made = [_finish(method, kept, last, lengths, skipped) for method in methods]
    return made[0] if len(made) == 1 else torch.cat(_alike(made), 1)


def _finish(
    method: Method,
    kept: Mapping[KeptLine, torch.Tensor],
    last: torch.Tensor | None,
    lengths: torch.Tensor,
    skipped: torch.Tensor | None,
) -> torch.Tensor:
    if method == "last":
        assert last is not None
        # of a prompt of skipped tokens alone it is zero
        return last if skipped is None else torch.where((skipped < lengths).unsqueeze(1), last, 0)
    if method in ("first", "max"):
        return kept[method]  # type: ignore[index]
    sums = kept["weighted" if method == "weightedmean" else "sum"]
    count = lengths.to(sums.dtype)
    left_out = torch.zeros_like(count) if skipped is None else torch.minimum(skipped.to(sums.dtype), count)
    if method == "weightedmean":
        divisor = (count * (count + 1) - left_out * (left_out + 1)) / 2
    else:
        divisor = count - left_out
    divisor = divisor.clamp(min=1).unsqueeze(1)
    return sums / (divisor.sqrt() if method == "mean_sqrt_len" else divisor)


def _alike(lines: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """In one dtype, the widest."""
    dtype = lines[0].dtype
    for line in lines[1:]:
        dtype = torch.promote_types(dtype, line.dtype)
    return [line.to(dtype) for line in lines]


def starts_of(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
    """Device: [B + 1] the first token of each row in the step."""
    if view.query_starts is not None:
        return view.query_starts
    return torch.arange(len(hidden) + 1, dtype=torch.int32, device=hidden.device)


def begins_of(starts: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Device: [B] the first token of each row that counts, its end where none does. Rows past those given skip none."""
    begins = starts[:-1].clone()
    begins[: len(skipped)] += skipped.to(begins.dtype)
    return torch.minimum(begins, starts[1:])


def take_ranges(starts: Sequence[int], counts: Sequence[int], upload: Upload) -> Lines:
    """Host: the tokens of some rows, one row after another. Neighbours in the step are a view of it."""
    first, total = starts[0], sum(counts)
    if starts[-1] + counts[-1] - first == total:
        return lambda hidden: hidden.narrow(0, first, total)
    return take_lines(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]), upload)


def take_lines(places: Longs, upload: Upload) -> Lines:
    """Host: these lines."""
    span = upload.put(places.astype(np.int64))
    return lambda hidden: hidden.index_select(0, upload.tensor(span))
