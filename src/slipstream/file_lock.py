"""Locks between processes on files and folders; a lock ends with its file descriptor, so also with its process."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process has the lock of this file, which is created, and has it meanwhile."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(file: int) -> bool:
    """False: another process has the lock, or the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
