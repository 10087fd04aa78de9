"""Sets up the standard streams: all are open, and pipes and files use UTF-8 in any locale."""

from __future__ import annotations

import io
import os
import sys
from typing import IO

from slipstream.base.errors import UserError


def set_up_streams() -> None:
    """Replaces a closed stream by the null device, so that no socket or file gets its descriptor. Output to a pipe or a
    file is UTF-8; a terminal keeps its encoding, with escapes for characters that it lacks."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, _null(number, mode))
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        if out.isatty():
            out.reconfigure(errors="backslashreplace")
        else:
            out.reconfigure(encoding="utf-8", errors="surrogateescape")


def _null(number: int, mode: str) -> IO[str]:
    try:
        os.fstat(number)
    except OSError:  # the descriptor is free
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        return open(number, mode, encoding="utf-8", closefd=False)
    return open(os.devnull, mode, encoding="utf-8")


def read_stdin(*, of_terminal: bool = False) -> str | None:
    """Returns the text of standard input; None if that is a terminal, unless `of_terminal`."""
    source = sys.stdin
    if source.isatty():
        return source.read() if of_terminal else None
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(encoding="utf-8-sig", errors="strict")  # without a byte order mark
    try:
        return source.read()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise UserError(f"standard input is not UTF-8 text: it has the byte {wrong:#04x}; convert it first") from None
