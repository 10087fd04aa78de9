"""The pooling methods on a step's hidden states: a line for each prompt, or the lines of its tokens.

All that decides which lines are taken is known to the host; where it takes all rows of a step, the device reads it
from the step's own starts, so that the work can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.config.pooling_info import Method
from slipstream.nn.context import BatchView
from slipstream.ops.pool import segment_sum
from slipstream.runner.batch.staging import Upload

Longs = np.ndarray[Any, np.dtype[np.int64]]
Lines = Callable[[torch.Tensor], torch.Tensor]
"""Device: hidden states [T, hidden] to some of their lines."""


def pool_all(method: Method, view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
    """Device: one line for each row of a step, all of whose prompts are in it whole. Rows that pad give anything."""
    starts = view.query_starts
    if starts is None:  # one token a row, which is first, last and mean
        return hidden
    if method == "mean":
        return segment_sum(hidden, starts) / view.lengths.clamp(min=1).unsqueeze(1)
    if method == "first":
        return hidden.index_select(0, starts[:-1].clamp(max=len(hidden) - 1))
    return hidden.index_select(0, (starts[1:] - 1).clamp_(min=0))


def sums_of(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
    """Device: the sum of each row's tokens in this step, in float32 at least."""
    if view.query_starts is None:
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return segment_sum(hidden, view.query_starts)


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
