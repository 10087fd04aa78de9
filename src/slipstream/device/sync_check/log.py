"""The waits that a watcher found, and those that are allowed."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

_reason: ContextVar[str | None] = ContextVar("sync_allowed", default=None)


@contextmanager
def sync_allowed(reason: str) -> Iterator[None]:
    """Marks a block in which the host may wait. `reason` is a literal string: the AST net reads it."""
    assert reason, "a wait without a reason; say why the host may wait here"
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)


@dataclass(slots=True)
class Sync:
    """One stack at which the host waited, with the number and the duration of all waits there."""

    what: str
    stack: tuple[str, ...]  # "file:line in function", innermost first
    allowed: str | None  # the reason passed to sync_allowed
    count: int = 0
    seconds: float = 0.0  # total time that the host waited

    def __str__(self) -> str:
        why = "" if self.allowed is None else f", allowed: {self.allowed}"
        lines = "".join(f"\n    {line}" for line in self.stack)
        return f"{self.what} ({self.count} times, {1000 * self.seconds:.2f} ms{why}){lines}"


@dataclass(slots=True)
class SyncLog:
    on_found: Callable[[Sync], None] | None = None  # called for each wait that is not allowed, each time
    _syncs: dict[tuple[str, tuple[str, ...], str | None], Sync] = field(default_factory=dict)

    @property
    def found(self) -> list[Sync]:
        """The waits that are not allowed."""
        return [sync for sync in self._syncs.values() if sync.allowed is None]

    @property
    def allowed(self) -> list[Sync]:
        return [sync for sync in self._syncs.values() if sync.allowed is not None]

    def add(self, what: str, seconds: float, *, unless_known: bool = False) -> None:
        """`unless_known`: skip it if a wait of another name was found at the same stack."""
        stack, reason = _stack(), _reason.get()
        if unless_known and any(name != what and known == stack for name, known, _ in self._syncs):
            return
        sync = self._syncs.setdefault((what, stack, reason), Sync(what, stack, reason))
        sync.count += 1
        sync.seconds += seconds
        if sync.allowed is None and self.on_found is not None:
            self.on_found(sync)


def _stack() -> tuple[str, ...]:
    """The caller's frames, innermost first, without this package, torch, torch's warning machinery, and the frames that
    run a script."""
    left_out = (os.path.dirname(__file__), torch.__path__[0], "<frozen ", warnings.__file__, contextlib.__file__)
    return tuple(
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in reversed(traceback.extract_stack())
        if not frame.filename.startswith(left_out)
    )
