"""Processes that tests start: their environment, and whether they have ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def child_env(*folders: str, **more: str) -> dict[str, str]:
    """The environment of this process, so that the child uses the same device, with all import paths in PYTHONPATH: the
    package may be found through pytest's `pythonpath`, which a child does not inherit. `folders` come before them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *filter(None, sys.path)]), **more}


def is_alive(pid: int) -> bool:
    """Whether a process has a thread that runs. Its files are open until the last one ends, also if its first thread,
    whose state is that of the process, has become a zombie before."""
    try:
        threads = [thread / "stat" for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(map(_runs, threads))


def _runs(thread: Path) -> bool:
    try:
        return thread.read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
