"""Members: the rows of a step that pool, now or later, as the host sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.runner.batch.staging import Span, Upload
from slipstream.runner.pooling.methods import Lines, take_lines, take_ranges
from slipstream.runner.pooling.pool_mode import PoolMode
from slipstream.step import Ints


@dataclass(frozen=True, slots=True)
class PooledRow:
    """A row of the step that pools, now or later."""

    place: int  # in the plan
    row: int
    start: int  # of its tokens in the step
    tokens: Ints
    length: int  # after the step
    setting: PoolMode
    query: int  # number of the kept query, or -1
    result: int  # its place among the results, or -1 if it goes on

    @property
    def ends(self) -> bool:
        return self.result >= 0

    @property
    def has_begun(self) -> bool:
        """Before this step. Where it matters nothing of a prompt comes from the cache."""
        return self.length > len(self.tokens)

    @property
    def picked(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Places in the step of the tokens that count."""
        tokens, setting = self.tokens, self.setting
        if setting.step_tag is not None:
            return np.flatnonzero(tokens == setting.step_tag) + self.start
        return np.flatnonzero(~np.isin(tokens, setting.skips)) + self.start

    @property
    def num_picked(self) -> int:
        return len(self.picked) if self.setting.picks else len(self.tokens)


def skipped_in_step(members: Sequence[PooledRow], upload: Upload) -> Span | None:
    """Host: of each row up to the last member's, how many of its first tokens in the step do not count; None where
    all do."""
    skips = {m.place: min(max(m.setting.skip - (m.length - len(m.tokens)), 0), len(m.tokens)) for m in members}
    if not any(skips.values()):
        return None
    counts = np.zeros(max(skips) + 1, np.int64)
    counts[list(skips)] = list(skips.values())
    return upload.put(counts)


def take_tokens(members: Sequence[PooledRow], upload: Upload) -> Lines:
    """Host: the lines that count of members of one setting."""
    if members[0].setting.picks:
        return take_lines(np.concatenate([member.picked for member in members]), upload)
    return take_ranges([member.start for member in members], [len(member.tokens) for member in members], upload)


def by_mode(members: Sequence[PooledRow]) -> dict[PoolMode, list[PooledRow]]:
    groups: dict[PoolMode, list[PooledRow]] = {}
    for member in members:
        groups.setdefault(member.setting, []).append(member)
    return groups
