"""Pooled results: blocks of vectors in one flat buffer, which is copied once per step, and how the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import NO_INTS, Floats, Ints, StepResult
from slipstream.device.device import Bytes
from slipstream.device.streams import Event
from slipstream.runner.pool_methods import PoolMode, TakeHidden, take_hidden, take_ranges
from slipstream.runner.results import ResultShape, StepHandle, host_copy, lay_out
from slipstream.runner.staging import Upload, UploadSpan

SUM = "sum of "
_NO_FLAGS = np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True)
class ResultBlock:
    """Results of one mode: vectors of `width` elements."""

    width: int
    indices: list[int] | None  # indices among the step's results; None: all of them, in order
    counts: list[int] | None  # vectors of each result; None: each result is one vector
    num_vectors: int

    @property
    def is_large(self) -> bool:
        return self.counts is not None or self.width > 4096

    @staticmethod
    def lay_out(blocks: list[ResultBlock], dtype: np.dtype[Any]) -> ResultShape:
        """All vectors, then the sum of each vector of large blocks, which shows NaN and infinite values.

        The host sums the vectors of small blocks itself; for large blocks that would take longest of all.
        """
        vectors = [(str(i), (block.num_vectors, block.width), dtype) for i, block in enumerate(blocks)]
        sums = [(f"{SUM}{i}", (block.num_vectors if block.is_large else 0,), dtype) for i, block in enumerate(blocks)]
        return lay_out([*vectors, *sums])

    def name(self, index: int, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Device: the values of the fields of block number `index`."""
        return {str(index): vectors} | ({f"{SUM}{index}": vectors.sum(1)} if self.is_large else {})

    def split(self, vectors: Floats) -> list[Floats]:
        """The results, as views of `vectors`."""
        if self.counts is None:
            return list(vectors)
        return [vectors[end - count : end] for end, count in zip(accumulate(self.counts), self.counts, strict=True)]


class PoolHandle(StepHandle):
    """Pooled results of a step in flight."""

    def __init__(self, ready: Event | None, shape: ResultShape, host: Bytes, blocks: list[ResultBlock]) -> None:
        super().__init__(ready, shape, host)
        self._blocks = blocks

    def wait(self) -> StepResult:
        if self.ready is not None:
            self._wait_until_copied()
        assert self._host is not None
        own = host_copy(self._host)
        arrays = [np.ndarray(field.shape, field.dtype, own, field.start) for field in self._shape.fields]
        vectors, sums = arrays[: len(self._blocks)], arrays[len(self._blocks) :]
        if len(vectors) == 1 and self._blocks[0].indices is None:  # the usual case
            pooled = tuple(self._blocks[0].split(vectors[0]))
            return StepResult(NO_INTS, _NO_FLAGS, pooled=pooled, pool_failed=_bad(self._blocks[0], vectors[0], sums[0]))
        results: dict[int, Floats] = {}
        failed: set[int] = set()
        for block, own_vectors, own_sums in zip(self._blocks, vectors, sums, strict=True):
            assert block.indices is not None, "of several blocks each says whose it is"
            results.update(zip(block.indices, block.split(own_vectors), strict=True))
            failed.update(block.indices[i] for i in _bad(block, own_vectors, own_sums))
        pooled = tuple(results[index] for index in range(len(results)))
        return StepResult(NO_INTS, _NO_FLAGS, pooled=pooled, pool_failed=frozenset(failed))


_NONE: frozenset[int] = frozenset()


def _bad(block: ResultBlock, vectors: Floats, sums: Floats) -> frozenset[int]:
    """Indices of results with NaN or infinite values. The total sum shows whether there are any."""
    with np.errstate(all="ignore"):
        if np.isfinite((sums if block.is_large else vectors).sum()):
            return _NONE
    return frozenset(i for i, result in enumerate(block.split(vectors)) if not np.isfinite(result).all())


# PooledRow: the host's view of a row of the step that belongs to a pooling request.


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
