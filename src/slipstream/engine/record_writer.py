"""RecordWriter: writes the steps of a running engine to files, each time so many bytes were recorded.

The core's thread copies references only; a thread of the writer encodes and writes. While it is busy, nothing is
queued: the next file begins later.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from slipstream.engine.record_file import Recording
from slipstream.engine.record_folder import MAX_FILES, SUFFIX, open_folder, write_private

log = logging.getLogger(__name__)


class RecordWriter:
    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: recorded between two files."""
        self._num_bytes = num_bytes
        self._recorded = 0  # since the last file
        self._num_files = 0
        self._pool = ThreadPoolExecutor(1, "slipstream-record")
        self._job: Future[None] | None = None

    def is_due(self, num_bytes: int) -> bool:
        """Adds recorded bytes. Returns whether a file is to be written now."""
        self._recorded += num_bytes
        return self._recorded >= self._num_bytes and (self._job is None or self._job.done())

    def write(self, recording: Recording) -> None:
        self._recorded = 0
        self._num_files += 1
        name = f"steps-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._num_files:06}{SUFFIX}"
        self._job = self._pool.submit(_write, recording, name)

    def close(self) -> None:
        """Returns when the last file is written."""
        self._pool.shutdown()


def _write(recording: Recording, name: str) -> None:
    try:
        settings = recording.config.record
        folder = open_folder(settings.folder)
        write_private(folder / name, recording.encode(redact=settings.redact))
        for old in sorted(folder.glob(f"steps-*{SUFFIX}"), key=_age)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except Exception:  # a full disk must not end the engine
        log.exception("recorded steps could not be written to %s", name)


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # removed by another engine
        return 0.0, path.name
