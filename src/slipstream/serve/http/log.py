"""The server's log: one event a line on standard error, as text or as JSON."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def set_up_log(level: str, style: str = "text") -> None:
    handler = logging.StreamHandler()
    formatter = _JsonLines() if style == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s", _TIME)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("slipstream").setLevel(level.upper())
    # how the server itself is doing: a line in a while, not one for each request
    logging.getLogger("slipstream.status").setLevel("ERROR" if level == "error" else "INFO")


_TIME = "%Y-%m-%dT%H:%M:%SZ"


class _JsonLines(logging.Formatter):
    """What a record was given beside its message, a request's id above all, stands in fields of its own."""

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
