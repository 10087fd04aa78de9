"""The folder and the files of the flight recorder, which only their user can read."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

SUFFIX = ".slipstream"
MAX_FILES = 8  # recordings kept in the folder


def open_folder(name: str | None) -> Path:
    """The folder for recordings; None: a folder of this user among the temporary files."""
    folder = _private_folder() if name is None else Path(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def write_private(path: Path, data: bytes) -> Path:
    """Writes a new file that only this user can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    return path


def _private_folder() -> Path:
    """A folder of this user among the temporary files; a new one where another user has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"slipstream-records-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="slipstream-records-"))
