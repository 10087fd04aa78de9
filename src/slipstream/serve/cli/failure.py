"""How a command ends that fails: one line on standard error, as text or as JSON, and an exit code.

A mistake of the user ends with 2, an engine that failed with 1.
"""

from __future__ import annotations

import logging
import sys

from slipstream.errors import EngineClosed, EngineDead, SlipstreamError
from slipstream.log import set_up_log
from slipstream.serve.cli.wording import in_flags

log = logging.getLogger("slipstream.status")


def tell_failure(error: BaseException, *, as_json: bool = False) -> int:
    """Writes the line, and returns the exit code."""
    text = one_line(error)
    if as_json:
        set_up_log("error", "json")
        log.critical("%s", text, exc_info=None if isinstance(error, SlipstreamError) else error)
    else:
        print(f"slipstream: {text}", file=sys.stderr)
    return 2 if isinstance(error, SlipstreamError) and not isinstance(error, EngineDead | EngineClosed) else 1


def one_line(error: BaseException) -> str:
    """An error without line breaks, options named as flags. That the engine died says nothing without its cause; other
    errors say it all."""
    text = str(error) or type(error).__name__
    if isinstance(error, EngineDead) and error.__cause__ is not None:
        text += f" ({type(error.__cause__).__name__}: {error.__cause__})"
    return in_flags(" ".join(text.split()))
