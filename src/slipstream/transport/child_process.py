"""Parents and children: a child runs the code that its parent runs, and does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
from pathlib import Path

import slipstream

_PR_SET_PDEATHSIG = 1
_PARENT = "SLIPSTREAM_PARENT_PID"


def child_environment() -> dict[str, str]:
    """The environment of Python child processes: they import this same slipstream, nothing from the current directory.

    `python -m` and `python -c` search the current directory before the standard library, so a model's folder could
    bring a dis.py. PYTHONSAFEPATH turns that off, also for processes that the child starts. An empty entry of
    PYTHONPATH means the current directory too and is left out.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = str(Path(slipstream.__file__).parents[1])
    if root != sysconfig.get_path("purelib"):  # where packages are installed the child looks anyway
        paths.insert(0, root)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", _PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """For a child to call, on Linux. Elsewhere the closed socket tells us, though only between steps."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the parent names itself: in a container it may be process 1, which also adopts children whose parent has died
    expected = int(os.environ.pop(_PARENT, "0")) or parent
    if os.getppid() != expected:
        os._exit(1)  # it died before we could say so
