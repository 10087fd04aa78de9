"""GrammarChecker: checks a grammar in a child process, which is killed if it takes too long.

The limit is CPU time of the child, so that a busy machine refuses no grammar that a quiet one takes.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from slipstream.scheduler.grammar import check_child

MAX_SECONDS = 2.0  # of CPU time of one check
_WALL_FACTOR = 15  # the check ends after so many times more, if the child gets no CPU time
_START_SECONDS = 30.0  # of the child's start, on a busy machine


class GrammarTooComplex(ValueError):
    """The check did not end within its limits of time and memory."""


class GrammarChecker:
    """One child process, started by the first check and restarted after one that was killed. For one thread."""

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        self.max_seconds = max_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._is_checking = False
        self._lock = threading.Lock()  # of `_is_checking`: `stop` kills no child of another check

    def check(self, grammar: str, is_wanted: Callable[[], bool] = lambda: True) -> str:
        """Returns what is wrong with a grammar of llguidance; an empty string if nothing is.

        Raises GrammarTooComplex if its limits end the check, or `stop`, before which `is_wanted` becomes false.
        """
        child = self._child
        if child is None:
            child = self._child = self._start()
        data = grammar.encode()
        assert child.stdin is not None
        with self._lock:
            self._is_checking = is_wanted()
        try:
            if not self._is_checking:
                raise GrammarTooComplex("no request waits for it")
            child.stdin.write(len(data).to_bytes(check_child.HEADER, "little") + data)
            child.stdin.flush()
            return self._read(child, _WALL_FACTOR * self.max_seconds).decode(errors="replace")
        except (BrokenPipeError, TimeoutError, EOFError):
            self._child = None
            raise GrammarTooComplex(
                f"it is too complex: compiling it takes more than {self.max_seconds:g} s or "
                f"{check_child.MAX_MEMORY >> 20} MiB"
            ) from None
        finally:
            with self._lock:
                self._is_checking = False
            if self._child is not child:  # it has ended, or `stop` has ended it
                _end(child)

    def stop(self) -> None:
        """End the check that another thread waits for, if there is one."""
        with self._lock:
            if self._is_checking and self._child is not None:
                self._child.kill()
                self._child = None

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _start(self) -> subprocess.Popen[bytes]:
        child = _run_child(self.max_seconds)
        try:
            self._read(child, _START_SECONDS)
        except (TimeoutError, EOFError) as error:
            _end(child)
            raise RuntimeError(
                "the process that checks grammars did not start; `python -c 'import llguidance'` may say why"
            ) from error
        return child

    def _read(self, child: subprocess.Popen[bytes], seconds: float) -> bytes:
        end = time.monotonic() + seconds
        size = int.from_bytes(_read_exactly(child, check_child.HEADER, end), "little")
        return _read_exactly(child, size, end)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()  # closes the pipes and collects the child


def _run_child(max_seconds: float) -> subprocess.Popen[bytes]:
    from llguidance import _lib  # takes 30 ms, at the first grammar

    return subprocess.Popen(
        [sys.executable, "-I", check_child.__file__, str(_lib.__file__), str(max_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )


def _read_exactly(child: subprocess.Popen[bytes], size: int, end: float) -> bytes:
    assert child.stdout is not None
    pipe, parts = child.stdout.fileno(), b""
    while len(parts) < size:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts
