"""Child processes: the environment in which they import the same code as their parent, their exit with it, and how
they ended."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import sysconfig
from collections import deque
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


# Keeps the garbage collector off permanent objects: those of torch and the model, while they are loaded and later.
#
# Otherwise each full collection would traverse all of them.


class FrozenGc:
    """Excludes present objects from garbage collection, in one block at a time: while thousands of small results are
    created, a collection would cost more than the results.

    Python counts frozen objects by visiting each of them, 80 ms for a million. The count is taken until it is not zero
    once: a process that has frozen its objects keeps them so.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._is_left_to_process = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Exclude all present objects from garbage collection until the block ends. Both ends cost almost nothing.

        Does nothing inside another block, or if the process has frozen objects: the end of the block would return those
        to the collector.
        """
        if not (self._is_open or self._is_left_to_process):
            self._is_left_to_process = gc.get_freeze_count() > 0
        if self._is_open or self._is_left_to_process:
            yield
            return
        self._is_open = True
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            self._is_open = False


frozen_gc = FrozenGc().block


@contextmanager
def loading() -> Iterator[None]:
    """No garbage collection while modules and a model are loaded: the objects are permanent, and every full collection
    would traverse all of them, as later ones would."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


# Backoff: the delay before a process that has died is started again.


class Backoff:
    """The delay before a restart: doubled with each death within `window` seconds, and none after `limit` deaths."""

    def __init__(self, limit: int = 5, window: float = 600.0, first: float = 0.5, longest: float = 30.0) -> None:
        self.limit = limit
        self.window = window
        self._first = first
        self._longest = longest
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Notes a death. Returns the seconds until the restart; None: no restart."""
        self._deaths.append(now)
        while self._deaths[0] < now - self.window:
            self._deaths.popleft()
        if len(self._deaths) >= self.limit:
            return None
        return min(self._longest, self._first * 2.0 ** (len(self._deaths) - 1))
