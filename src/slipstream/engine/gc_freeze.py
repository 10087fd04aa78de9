"""Garbage collection while thousands of small results are made: only what is new is looked through.

Each collection would otherwise walk over all that torch and the model have loaded, which costs more than the results.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """What is there now is taken for needed until the block ends. Both ends cost next to nothing."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
