"""Parents and children: a child runs the code that its parent runs, and does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import slipstream

_PR_SET_PDEATHSIG = 1


def child_environment() -> dict[str, str]:
    """Ours, in which the child finds this same slipstream, installed or not."""
    root = str(Path(slipstream.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def die_with_parent() -> None:
    """For a child to call, on Linux. Elsewhere the closed socket tells us, though only between steps."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)  # it died before we could say so
