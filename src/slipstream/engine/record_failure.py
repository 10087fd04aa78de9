"""Writes the recording of a failed engine to a file and logs its path."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from slipstream.engine.record_folder import MAX_FILES, SUFFIX, open_folder, write_private
from slipstream.engine.recorder import Recorder

log = logging.getLogger(__name__)


def save_failure(recorder: Recorder, error: BaseException) -> Path | None:
    """Returns the file, or None if it could not be written: the failure of the engine matters more."""
    try:
        settings = recorder.config.record
        data = recorder.take(f"{type(error).__name__}: {error}").encode(redact=settings.redact)
        folder = open_folder(settings.folder)
        path = write_private(folder / f"failure-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}", data)
        for old in sorted(folder.glob(f"failure-*{SUFFIX}"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except Exception:
        log.exception("the last steps of the engine could not be written to a file")
        return None
    log.error("the last steps of the engine are in %s; `slipstream replay` checks them", path)
    return path
