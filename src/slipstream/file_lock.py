"""Locks between processes on files and folders; a lock ends with its file descriptor, so also with its process."""

from __future__ import annotations

import fcntl


def try_lock(file: int) -> bool:
    """False: another process has the lock, or the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
