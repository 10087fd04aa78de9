"""The log of a server's processes: one event a line on standard error, as text or as JSON.

Children log as their parent does: they read LEVEL and FORMAT from the environment, where the parent puts them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import msgspec

LEVEL, FORMAT = "SLIPSTREAM_LOG_LEVEL", "SLIPSTREAM_LOG_FORMAT"
_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def set_up_log(level: str, style: str = "text") -> None:
    handler = logging.StreamHandler()
    formatter = JsonLines() if style == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s", _TIME)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    if style == "json":  # what others write to standard error would be lines that are no JSON
        logging.captureWarnings(True)
        sys.excepthook = _log_unhandled
        threading.excepthook = lambda args: _log_unhandled(args.exc_type, args.exc_value, args.exc_traceback)
    logging.getLogger("slipstream").setLevel(level.upper())
    # how the server itself is doing: a line in a while, not one for each request
    logging.getLogger("slipstream.status").setLevel("ERROR" if level == "error" else "INFO")


def pass_on_log(level: str, style: str) -> None:
    """For a parent, before it starts children."""
    os.environ[LEVEL], os.environ[FORMAT] = level, style


def set_up_child_log() -> None:
    """Log settings of a child process without settings of its own."""
    set_up_log(os.environ.get(LEVEL) or "warning", os.environ.get(FORMAT) or "text")


def _log_unhandled(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, SystemExit):
        logging.getLogger("slipstream").critical("%s", kind.__name__, exc_info=(kind, error, trace))


_TIME = "%Y-%m-%dT%H:%M:%SZ"


class JsonLines(logging.Formatter):
    """One JSON object per line. Extra attributes of a record, such as a request's id, become fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, _TIME),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((name, value) for name, value in record.__dict__.items() if name not in _PLAIN)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


# Progress of a call: a bar on a terminal, a line now and then elsewhere.

_LINE_SECONDS = 10.0  # at least, between two lines and before the first one


@contextmanager
def progress(total: int, what: str, shown: bool = True, rate: str = "tok/s") -> Iterator[Callable[[int], None]]:
    """Yields a function to call for each of the `total` things that is done, with its number of tokens, or what else
    the `rate` counts. Written to standard error."""
    if not shown or total == 0 or sys.stderr is None or sys.stderr.closed:
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        yield _Lines(total, what, rate).advance
        return
    from rich.console import Console  # imported for interactive terminals only
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    # standard output stays where it is: a command writes its results there meanwhile
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total, rate="")
        start, counted = time.monotonic(), 0

        def advance(count: int) -> None:
            nonlocal counted
            counted += count
            bar.update(task, advance=1, rate=_per_second(counted, time.monotonic() - start, rate))

        yield advance


class _Lines:
    """Lines for a log file, a notebook or a pipe. The last one is written only after others."""

    def __init__(self, total: int, what: str, rate: str) -> None:
        self._total, self._what, self._rate = total, what, rate
        self._done = self._counted = 0
        self._start = self._last = time.monotonic()
        self._has_written = False

    def advance(self, count: int) -> None:
        self._done += 1
        self._counted += count
        now = time.monotonic()
        is_last = self._has_written and self._done == self._total
        if now - self._last < _LINE_SECONDS and not is_last:
            return
        self._last, self._has_written = now, True
        seconds = now - self._start
        line = f"slipstream: {self._done} of {self._total} {self._what} after {seconds:.0f} s"
        line += f", {text}" if (text := _per_second(self._counted, seconds, self._rate)) else ""
        if self._done < self._total:
            line += f", about {seconds / self._done * (self._total - self._done):.0f} s left"
        with suppress(OSError, ValueError):  # its reader has left: no reason to end the call
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def _per_second(count: int, seconds: float, unit: str) -> str:
    """Empty where nothing is counted."""
    return f"{count / seconds:.0f} {unit}" if count and seconds else ""


# The version of the package, for code that cannot import the package itself.
