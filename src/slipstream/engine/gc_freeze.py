"""Keeps the garbage collector off permanent objects: those of torch and the model, while they are loaded and later.

Otherwise each full collection would traverse all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class FrozenGc:
    """Excludes present objects from garbage collection, in one block at a time: while thousands of small results are
    created, a collection would cost more than the results.

    Python counts frozen objects by visiting each of them, 80 ms for a million. The count is taken until it is not zero
    once: a process that has frozen its objects keeps them so.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._is_left_to_process = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Exclude all present objects from garbage collection until the block ends. Both ends cost almost nothing.

        Does nothing inside another block, or if the process has frozen objects: the end of the block would return those
        to the collector.
        """
        if not (self._is_open or self._is_left_to_process):
            self._is_left_to_process = gc.get_freeze_count() > 0
        if self._is_open or self._is_left_to_process:
            yield
            return
        self._is_open = True
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            self._is_open = False


frozen_gc = FrozenGc().block


@contextmanager
def loading() -> Iterator[None]:
    """No garbage collection while modules and a model are loaded: the objects are permanent, and every full collection
    would traverse all of them, as later ones would."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
