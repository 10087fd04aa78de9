"""Child processes: the environment in which they import the same code as their parent, their exit with it, and how
they ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

_PR_SET_PDEATHSIG = 1
_PARENT = "SLIPSTREAM_PARENT_PID"
_ENDING = (signal.SIGTERM, signal.SIGINT)


def child_environment(more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Returns the environment for Python child processes: they import this slipstream, and nothing from the current
    directory.

    `python -m` and `python -c` search the current directory before the standard library, so a dis.py in a model's
    folder would be imported. PYTHONSAFEPATH prevents that, also in processes that the child starts. An empty entry of
    PYTHONPATH means the current directory as well and is removed. `more`: variables besides ours.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = str(Path(__file__).parents[2])  # of the package
    if root != sysconfig.get_path("purelib"):  # the child searches site-packages anyway
        paths.insert(0, root)
    own = {**os.environ, **more}
    return {**own, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", _PARENT: str(os.getpid())}


@contextmanager
def signals_held() -> Iterator[None]:
    """Children that are started here have SIGTERM and SIGINT blocked until they call `release_signals`: a signal to all
    processes of a unit or a terminal does not end a child that has no handlers yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_signals() -> None:
    """For a child that was started under `signals_held`, when its handlers are set."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def die_with_parent() -> None:
    """Makes the kernel kill this child process when its parent exits, on Linux. On other systems the child notices the
    closed socket, between two steps."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # the parent passes its pid: in a container it may be process 1, which also adopts orphans
    expected = int(os.environ.pop(_PARENT, "0")) or parent
    if os.getppid() != expected:
        os._exit(1)  # the parent exited before prctl was called


def how_it_ended(code: int | None) -> str | None:
    """Describes an abnormal end by the exit code; None while the process runs and after a normal exit."""
    if not code:
        return None
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; perhaps the machine ran out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit code {code}"
