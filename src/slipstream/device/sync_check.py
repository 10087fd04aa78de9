"""Where the host may wait for the device.

Launching a step never needs a token's value. A place that must read from the device all the same says so, and why;
`tests/nets/ast_net.py` finds the reads that do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sync_allowed(reason: str) -> Iterator[None]:
    """Marks a block in which the host may wait. `reason` is a literal string, for the reader and for the net."""
    assert reason, "a wait without a reason; say why the host may wait here"
    yield
