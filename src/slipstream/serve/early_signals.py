"""SIGTERM and SIGINT of a server before its event loop handles them, and after.

A signal that arrives during the start is recorded, and the server ends in order as soon as it could serve: nothing is
interrupted halfway, so no process, socket file or temporary folder is left. A second signal raises SystemExit. This
module is imported before all others.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT)

_recorded: list[int] = []


def record_signals() -> None:
    """For the main thread of a process that only serves: the handlers stay until others are set."""
    for number in ENDING:
        signal.signal(number, _record)


def has_recorded() -> bool:
    """Whether a signal has arrived; call it when the handlers of the server are set."""
    return bool(_recorded)


def exit_at_signals() -> None:
    """After the event loop, which removes its handlers: another signal ends the process at once, without an error."""
    for number in ENDING:
        signal.signal(number, _exit)


def _record(number: int, frame: FrameType | None) -> None:
    if _recorded:
        _exit(number, frame)
    _recorded.append(number)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
