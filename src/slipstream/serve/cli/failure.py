"""Reports the failure of a command: one line on standard error, as text or JSON, and an exit code.

The exit code is 2 for a user error and 1 for a failure of the engine.
"""

from __future__ import annotations

import logging
import sys

from slipstream.base.errors import EngineClosed, EngineDead, SlipstreamError
from slipstream.base.log import set_up_log
from slipstream.serve.cli.wording import in_flags

log = logging.getLogger("slipstream.status")


def print_failure(error: BaseException, *, as_json: bool = False) -> int:
    """Writes the line and returns the exit code."""
    text = one_line(error)
    if as_json:
        set_up_log("error", "json")
        log.critical("%s", text, exc_info=None if isinstance(error, SlipstreamError) else error)
    else:
        print(f"slipstream: {text}", file=sys.stderr)
    return 2 if isinstance(error, SlipstreamError) and not isinstance(error, EngineDead | EngineClosed) else 1


def one_line(error: BaseException) -> str:
    """Returns the error's text without line breaks and with options as flags. EngineDead includes its cause."""
    text = str(error) or type(error).__name__
    if isinstance(error, EngineDead) and error.__cause__ is not None:
        text += f" ({type(error.__cause__).__name__}: {error.__cause__})"
    return in_flags(" ".join(text.split()))
