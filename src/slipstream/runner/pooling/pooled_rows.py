"""PooledRow: the host's view of a row of the step that belongs to a pooling request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.contracts.step import Ints
from slipstream.runner.batch.staging import Upload, UploadSpan
from slipstream.runner.pooling.methods import TakeHidden, take_hidden, take_ranges
from slipstream.runner.pooling.pool_mode import PoolMode


@dataclass(frozen=True, slots=True)
class PooledRow:
    """A row of a pooling request, whose prompt ends with this step or continues."""

    index: int  # in the plan
    row: int
    start: int  # index of its first token in the step
    tokens: Ints
    length: int  # after this step
    mode: PoolMode
    query: int  # number of the stored query, or -1
    result: int  # index of its result, or -1 if the prompt continues

    @property
    def ends(self) -> bool:
        return self.result >= 0

    @property
    def has_begun(self) -> bool:
        """Whether the prompt began before this step. Where this matters, no prefix comes from the cache."""
        return self.length > len(self.tokens)

    @property
    def picked(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Indices in the step of the tokens that are results."""
        tokens, mode = self.tokens, self.mode
        if mode.step_tag is not None:
            return np.flatnonzero(tokens == mode.step_tag) + self.start
        return np.flatnonzero(~np.isin(tokens, mode.skips)) + self.start

    @property
    def num_picked(self) -> int:
        return len(self.picked) if self.mode.picks else len(self.tokens)


def skipped_in_step(rows: Sequence[PooledRow], upload: Upload) -> UploadSpan | None:
    """Host: for each row up to the last pooled one, the number of its leading tokens in this step that are not pooled;
    None if all tokens are pooled."""
    skips = {m.index: min(max(m.mode.skip - (m.length - len(m.tokens)), 0), len(m.tokens)) for m in rows}
    if not any(skips.values()):
        return None
    counts = np.zeros(max(skips) + 1, np.int64)
    counts[list(skips)] = list(skips.values())
    return upload.put(counts)


def take_tokens(rows: Sequence[PooledRow], upload: Upload) -> TakeHidden:
    """Host: select the result tokens of rows of one mode."""
    if rows[0].mode.picks:
        return take_hidden(np.concatenate([row.picked for row in rows]), upload)
    return take_ranges([row.start for row in rows], [len(row.tokens) for row in rows], upload)


def by_mode(rows: Sequence[PooledRow]) -> dict[PoolMode, list[PooledRow]]:
    groups: dict[PoolMode, list[PooledRow]] = {}
    for row in rows:
        groups.setdefault(row.mode, []).append(row)
    return groups
