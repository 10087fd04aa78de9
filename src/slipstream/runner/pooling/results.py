"""Pooled results: blocks of vectors in one flat buffer, which is copied once per step, and how the host reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from slipstream.contracts.step import NO_INTS, Floats, StepResult
from slipstream.device.device import Bytes
from slipstream.device.streams import Event
from slipstream.runner.host_copy import host_copy
from slipstream.runner.results import NO_RESULTS, ResultShape, StepHandle, lay_out

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


class MixedHandle(StepHandle):
    """A step with drawn tokens and pooled results, which one copy brings out."""

    def __init__(self, generated: StepHandle, pooled: StepHandle) -> None:
        super().__init__(pooled.ready, NO_RESULTS, None)
        self._generated = generated
        self._pooled = pooled

    def wait(self) -> StepResult:
        drawn, own = self._generated.wait(), self._pooled.wait()
        return replace(drawn, pooled=own.pooled, pool_failed=own.pool_failed)


_NONE: frozenset[int] = frozenset()


def _bad(block: ResultBlock, vectors: Floats, sums: Floats) -> frozenset[int]:
    """Indices of results with NaN or infinite values. The total sum shows whether there are any."""
    with np.errstate(all="ignore"):
        if np.isfinite((sums if block.is_large else vectors).sum()):
            return _NONE
    return frozenset(i for i, result in enumerate(block.split(vectors)) if not np.isfinite(result).all())
