"""CheckedPages: the content of the KV cache as a checker of plans knows it, without values.

For each slot of a page: the token and the position that were written last, UNKNOWN if that was before the recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.contracts.step import NULL_PAGE, Bools

Longs = NDArray[np.int64]

UNKNOWN = -1


class CheckedPages:
    def __init__(self, num_pages: Sequence[int], page_size: int) -> None:
        """`num_pages`: of each cache group."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._tokens = [np.full((num, page_size), UNKNOWN, np.int64) for num in num_pages]
        self._positions = [np.full((num, page_size), UNKNOWN, np.int64) for num in num_pages]
        # by group and slot of the second tier: tokens and positions of a page
        self._stored: dict[tuple[int, int], tuple[Longs, Longs]] = {}

    def write(self, group: int, page: int, position: int, token: int) -> None:
        self._positions[group][page, position % self.page_size] = position
        self.set_token(group, page, position, token)

    def set_token(self, group: int, page: int, position: int, token: int) -> None:
        """A position that was written before turns out to have this token."""
        self._tokens[group][page, position % self.page_size] = token

    def read(self, table: Mapping[int, int], group: int, start: int, stop: int) -> tuple[Longs, Longs, Bools]:
        """Tokens and positions in the slots of these positions, and which of the slots have a page. `table`: pages of
        the row by entry."""
        size = self.page_size
        pages = np.array([table.get(entry, NULL_PAGE) for entry in range(start // size, -(-stop // size))], np.int64)
        first = start % size
        taken = slice(first, first + stop - start)
        held = np.repeat(pages != NULL_PAGE, size)[taken]
        return self._tokens[group][pages].ravel()[taken], self._positions[group][pages].ravel()[taken], held

    def copy(self, group: int, source: int, target: int) -> None:
        self._tokens[group][target] = self._tokens[group][source]
        self._positions[group][target] = self._positions[group][source]

    def store(self, group: int, page: int, slot: int) -> None:
        """Copies a page to a slot of the second tier."""
        self._stored[group, slot] = self._tokens[group][page].copy(), self._positions[group][page].copy()

    def load(self, group: int, slot: int, page: int) -> bool:
        """Copies a slot of the second tier to a page. Returns whether its content is known: it is not if the slot was
        stored before the recording, by an idle engine or by another engine."""
        stored = self._stored.get((group, slot))
        self._tokens[group][page], self._positions[group][page] = stored or (UNKNOWN, UNKNOWN)
        return stored is not None
