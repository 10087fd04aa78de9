"""SIGTERM and SIGINT of a server before its event loop handles them, and after.

A signal that arrives during the start is recorded, and the server ends in order as soon as it could serve: nothing is
interrupted halfway, so no process, socket file or temporary folder is left. A second signal raises SystemExit. At no
moment does a signal have the system's default, which kills the process. This module is imported before all others.
"""

from __future__ import annotations

import atexit
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Mapping
    from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT)

_recorded: list[int] = []


def record_signals() -> None:
    """For the main thread of a process that only serves: the handlers stay until others are set."""
    for number in ENDING:
        signal.signal(number, _record)
    atexit.register(ignore_signals)  # the interpreter's end sets defaults, except where a signal is ignored


def has_recorded() -> bool:
    """Whether a signal has arrived; call it when the handlers of the server are set."""
    return bool(_recorded)


def call_at_signals(loop: AbstractEventLoop, calls: Mapping[signal.Signals, Callable[[], object]]) -> None:
    """Has the event loop call these functions at these signals, until `ignore_signals`.

    Not by handlers of the loop, which are removed when it closes.
    """
    loop.add_signal_handler(signal.SIGURG, lambda: None)  # makes the loop wake up at any signal
    for number, call in calls.items():
        signal.signal(number, partial(_call_soon, loop, call))


def ignore_signals(*more: int) -> None:
    """When the process has ended its work: nothing is left to interrupt."""
    for number in (*ENDING, *more):
        signal.signal(number, signal.SIG_IGN)


def exit_at_signals() -> None:
    """While the server waits for other processes: another signal ends it at once, without an error."""
    for number in ENDING:
        signal.signal(number, _exit)


def _call_soon(loop: AbstractEventLoop, call: Callable[[], object], number: int, frame: FrameType | None) -> None:
    loop.call_soon_threadsafe(call)


def _record(number: int, frame: FrameType | None) -> None:
    if _recorded:
        _exit(number, frame)
    _recorded.append(number)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
