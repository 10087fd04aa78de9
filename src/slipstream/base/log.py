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
from contextlib import contextmanager
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


# A progress bar for a terminal: finished requests and tokens per second.


@contextmanager
def progress(total: int, what: str, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function to call for each finished request with its number of tokens. No output without a terminal."""
    if not shown or total == 0 or not sys.stderr.isatty():
        yield lambda num_tokens: None
        return
    from rich.console import Console  # imported for interactive terminals only
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), rate)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, rate="")
        start, total_tokens = time.monotonic(), 0

        def advance(num_tokens: int) -> None:
            nonlocal total_tokens
            total_tokens += num_tokens
            bar.update(task, advance=1, rate=f"{total_tokens / (time.monotonic() - start):.0f} tok/s")

        yield advance


# The version of the package, for code that cannot import the package itself.
