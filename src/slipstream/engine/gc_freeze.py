"""Limits garbage collection to new objects while thousands of small results are created.

Otherwise each collection would traverse all objects of torch and the model, which costs more than the results.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude all present objects from garbage collection until the block ends. Both ends cost almost nothing.

    Does nothing if the process has frozen objects already: the end of the block would return those to the collector.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
