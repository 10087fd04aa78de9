"""Child processes: the environment in which they import the same code as their parent, their exit with it, how they
ended, forks, and children that work within limits of time and memory."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from slipstream.base.errors import EngineClosed

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
def signals_deferred() -> Iterator[None]:
    """Children that are started here have SIGTERM and SIGINT blocked until they call `release_signals`: a signal to all
    processes of a unit or a terminal does not end a child that has no handlers yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_signals() -> None:
    """For a child that was started under `signals_deferred`, when its handlers are set."""
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


def enter_child() -> None:
    """The first call of a core or rank. It ends with its parent, which alone decides when: Ctrl-C in a terminal
    signals the whole process group."""
    from slipstream.base.log import set_up_child_log  # other children have the standard library only

    die_with_parent()
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    release_signals()
    set_up_child_log()
    faulthandler.enable()


def check_process(pid: int) -> None:
    """Raises in a fork of the process that made an engine: a call would wait forever for threads that do not exist."""
    if pid != os.getpid():
        raise EngineClosed(
            f"process {pid} made this engine, and this is a fork of it, without its threads; make a new engine here"
        )


def how_it_ended(code: int | None) -> str | None:
    """Describes an abnormal end by the exit code; None while the process runs and after a normal exit."""
    if not code:
        return None
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; perhaps the machine ran out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit code {code}"


# start_child: starts a core, a rank or a front end of our own code.


class Child:
    """A process of this package, for the process that started it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        """`name`: of the process in sentences, such as "the engine core"."""
        self.process = process
        self.name = name

    def how_it_ended(self) -> str | None:
        """Describes an abnormal end; None while the process runs and after a normal exit."""
        code = self.process.poll()
        how = how_it_ended(code)
        if how is None:
            return None
        return f"{self.name} {'was' if code is not None and code < 0 else 'ended with'} {how}"

    def wait(self, seconds: float) -> str | None:
        """Waits for the exit, kills the process after `seconds`, and returns what `how_it_ended` does."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"{self.name} did not exit within {seconds:g} s and was killed"
        return self.how_it_ended()


def start_child(
    name: str,
    module: str,
    arguments: Sequence[object],
    files: Sequence[int],
    start: bytes = b"",
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    in_session: bool = True,
) -> Child:
    """Starts `python -m module arguments`, which calls `release_signals`. `files`: descriptors that it inherits.
    `start`: its standard input, which other users cannot see, as they can arguments. `environment`: variables besides
    ours. `in_session`: signals of a terminal reach it too."""
    with signals_deferred():
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),  # keeps standard output free for the command's own output
            pass_fds=files,
            start_new_session=not in_session,
            env=child_environment(environment),
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # it may have exited already
        pipe.write(start)
    return Child(process, name)


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


# LimitedChild: calls a function in a child process, which is killed if it takes too long.
#
# A thread cannot be stopped; a process can. The limit is CPU time of the child, so that a busy machine refuses nothing
# that a quiet one takes.

_HEADER = 4  # bytes of a message's length
MAX_CHILD_MEMORY = 2**30  # bytes, unless a caller has another limit
MAX_CHILD_STACK = 2**23  # bytes: recursion that passes it would end a process. A thread that does the same has more
_WALL_FACTOR = 15  # a call ends after so many times the CPU seconds, if the child gets no CPU time
_START_SECONDS = 30.0  # of the child's start, on a busy machine


class LimitPassed(Exception):
    """A call did not end within its limits of time and memory, which the text names."""


class LimitedChild:
    """One child process, started by the first call and again after one that was killed. For one thread at a time.

    It runs `python -m module seconds bytes arguments`, which calls `answer_calls`.
    """

    def __init__(self, module: str, *arguments: str, max_seconds: float, max_memory: int = MAX_CHILD_MEMORY) -> None:
        """`max_seconds`: of CPU time of one call. `max_memory`: bytes of address space beyond what it has at first."""
        self.max_seconds = max_seconds
        self._limits = f"more than {max_seconds:g} s or {max_memory >> 20} MiB"
        self._command = [sys.executable, "-m", module, str(max_seconds), str(max_memory), *arguments]
        self._child: subprocess.Popen[bytes] | None = None
        self._is_calling = False
        self._lock = threading.Lock()  # of `_is_calling`: `stop` kills no child of another call

    def call(self, data: bytes, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
        """Returns what the child's function makes of `data`.

        Raises LimitPassed if the limits end the call, or `stop`, before which `is_wanted` becomes false.
        """
        child = self._child
        if child is None:
            child = self._child = self._start()
        with self._lock:
            self._is_calling = is_wanted()
        try:
            if not self._is_calling:
                raise LimitPassed("nothing waits for it")
            _write(child, data)
            return _read(child, _WALL_FACTOR * self.max_seconds)
        except (BrokenPipeError, TimeoutError, EOFError):
            self._child = None
            if _end(child) == -signal.SIGSEGV:
                raise LimitPassed(f"more than {MAX_CHILD_STACK >> 20} MiB of stack: it is nested too deeply") from None
            raise LimitPassed(self._limits) from None
        finally:
            with self._lock:
                self._is_calling = False
            if self._child is not child:  # it has ended, or `stop` has ended it
                _end(child)

    def stop(self) -> None:
        """End the call that another thread waits for, if there is one."""
        with self._lock:
            if self._is_calling and self._child is not None:
                self._child.kill()
                self._child = None

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=child_environment(),
        )
        try:
            _read(child, _START_SECONDS)
        except (TimeoutError, EOFError) as error:
            _end(child)
            command = " ".join(self._command[:3])
            raise RuntimeError(f"a child process did not start; `{command}` may say why") from error
        return child


def answer_calls(function: Callable[[bytes], bytes]) -> None:
    """In the child: calls `function` with what the parent sends, within the limits, until the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to all processes of a terminal
    if sys.platform.startswith("linux"):
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        most = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (MAX_CHILD_STACK, most))  # of this thread, whose stack grows
    max_seconds = float(sys.argv[1])
    source, target = sys.stdin.buffer, sys.stdout.buffer
    answer = b""  # to say that it is ready
    while True:
        target.write(len(answer).to_bytes(_HEADER, "little") + answer)
        target.flush()
        if not (header := source.read(_HEADER)):
            return
        data = source.read(int.from_bytes(header, "little"))
        signal.setitimer(signal.ITIMER_PROF, max_seconds)  # its signal ends the process
        answer = function(data)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end(child: subprocess.Popen[bytes]) -> int:
    """The exit code of the child, which may have ended before."""
    if child.returncode is None:
        child.kill()
        child.communicate()  # closes the pipes and collects the child
    return child.returncode


def _write(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    pipe, rest = child.stdin.fileno(), memoryview(len(data).to_bytes(_HEADER, "little") + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _read(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    end = time.monotonic() + seconds
    size = int.from_bytes(_read_exactly(child, _HEADER, end), "little")
    return _read_exactly(child, size, end)


def _read_exactly(child: subprocess.Popen[bytes], size: int, end: float) -> bytes:
    assert child.stdout is not None
    pipe, parts = child.stdout.fileno(), bytearray()
    while len(parts) < size:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
