"""ArrayCache: remembers what was found for an array, by the array's identity.

Plans share the arrays of their rows as long as the same rows compute. Steps with and without drafts take turns, so that
a few arrays are in use at a time.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
_MOST = 8  # arrays


class ArrayCache(Generic[T]):
    def __init__(self) -> None:
        # by id: the array, which keeps its id from another one, and what was found
        self._found: dict[int, tuple[np.ndarray[Any, Any], T]] = {}

    def get(self, array: np.ndarray[Any, Any]) -> T | None:
        entry = self._found.get(id(array))
        return None if entry is None else entry[1]

    def put(self, array: np.ndarray[Any, Any], value: T) -> T:
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[id(array)] = array, value
        return value

    def clear(self) -> None:
        self._found.clear()
