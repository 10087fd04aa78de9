"""Writes the recording of a failed engine to a folder that only its user can read, and logs the path."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from pathlib import Path

from slipstream.engine.recorder import Recorder

log = logging.getLogger(__name__)

SUFFIX = ".slipstream"
MAX_FILES = 8  # recordings kept in the folder


def save_failure(recorder: Recorder, error: BaseException) -> Path | None:
    """Returns the file, or None where it could not be written: the failure of the engine matters more."""
    try:
        settings = recorder.config.record
        data = recorder.take(f"{type(error).__name__}: {error}").encode(redact=settings.redact)
        folder = _private_folder() if settings.folder is None else Path(settings.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = write_private(folder / f"failure-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}", data)
        for old in sorted(folder.glob(f"failure-*{SUFFIX}"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except Exception:
        log.exception("the last steps of the engine could not be written to a file")
        return None
    log.error("the last steps of the engine are in %s; `slipstream replay` checks them", path)
    return path


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
