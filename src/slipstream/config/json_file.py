"""Reads the files of a model's or adapter's folder: regular files of a bounded size, and JSON in them.

A folder comes from elsewhere: reading a pipe would wait for ever, and a device such as /dev/zero never ends.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_READ = 2**28  # bytes of a file that is read whole; a large tokenizer.json has 2**25


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read. Raises OSError, also for what is not a regular file."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # NONBLOCK: a pipe has no writer
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("it is not a regular file")
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_file(path: Path) -> bytes:
    """The content of a file. Raises OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_READ:
            raise OSError(f"it has {size} bytes, and at most {MAX_READ} are read")
        return file.read(MAX_READ)


def read_utf8(path: Path) -> str:
    """The text of a file with any line ends. Raises OSError, or ValueError if it is not UTF-8."""
    return read_file(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def load_json(path: Path) -> Any:
    """Returns the content of a file. Raises OSError, or ValueError if the file is not JSON or is nested too deeply."""
    try:
        return json.loads(read_utf8(path))
    except RecursionError:  # no ValueError, which callers turn into an error that names the file
        raise ValueError("it is nested too deeply") from None
