"""DecodeArrays: the arrays of a plan's decodes, reused by later plans of the same rows.

Most plans decode the same requests as the plan before. Plans share arrays, so an array is never written after it was
part of a plan.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np

from slipstream.contracts.request import Request
from slipstream.contracts.step import NO_INTS, Ints

K = TypeVar("K")
V = TypeVar("V")
Drafted = tuple[tuple[int, int], ...]
"""Drafted rows of a plan: (row, number of positions)."""

_MOST_SHARED = 8  # arrays of earlier plans that later ones share


class DecodeArrays:
    """Rows and lengths of a plan's decodes. While the next plan decodes the same requests, each is one longer."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows: Ints = NO_INTS
        self.lengths: Ints = NO_INTS
        self.is_stale = False  # a commit subtracted rejected drafts from the length of a request
        # arrays of recent plans: steps with and without drafts take turns
        self._rows: dict[tuple[int, ...], Ints] = {}
        self._drafted: dict[tuple[tuple[int, ...], Drafted], tuple[Ints, Ints, Ints]] = {}
        self._row_numbers: tuple[int, ...] = ()  # of `rows`

    def advance(self, requests: list[Request]) -> None:
        """Update the arrays for the next plan. A request cannot change its row without a plan that lacks it."""
        is_same = requests == self.requests
        if is_same and not self.is_stale:
            self.lengths = self.lengths + 1
            return
        if not is_same:
            self.requests = requests
            self._row_numbers = numbers = tuple([request.row for request in requests])
            known = self._rows.get(numbers)
            if known is None:
                known = _keep(self._rows, numbers, np.array(numbers, np.int32))
            self.rows = known
        self.lengths = np.array([request.computed for request in requests], np.int32)
        self.is_stale = False

    def with_drafted(self, drafted: Drafted) -> tuple[Ints, Ints, Ints]:
        """Rows, numbers of positions and of host tokens of a plan of these decodes and then drafted rows: the same
        arrays as in a recent plan of the same rows and numbers of drafts."""
        known = self._drafted.get((self._row_numbers, drafted))
        if known is None:
            num_decodes, total = len(self.rows), len(self.rows) + len(drafted)
            num_tokens = np.ones(total, np.int32)
            num_tokens[num_decodes:] = [num for _, num in drafted]
            rows = np.concatenate([self.rows, np.array([row for row, _ in drafted], np.int32)])
            arrays = rows, num_tokens, np.zeros(total, np.int32)
            known = _keep(self._drafted, (self._row_numbers, drafted), arrays)
        return known


@lru_cache(1024)
def decode_counts(count: int) -> tuple[Ints, Ints, Ints]:
    """Per row of a plan of decodes only: one position, no host token, one drawn token."""
    ones = np.ones(count, np.int32)
    return ones, np.zeros(count, np.int32), ones


def _keep(known: dict[K, V], key: K, value: V) -> V:
    if len(known) >= _MOST_SHARED:
        known.clear()
    known[key] = value
    return value
