"""OwnedFolder: a temporary folder that does not outlive its process, even one that is killed.

A process that ends removes its folder. One that is killed cannot, so the next one does: the folder is locked as long as
its process runs, and a folder without a lock is removed when another of its kind is made. It imports no torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from slipstream.file_lock import try_lock


class OwnedFolder:
    def __init__(self, kind: str, parent: str | None = None) -> None:
        """`parent`: of the folder; None: the folder of temporary files."""
        above = Path(tempfile.gettempdir() if parent is None else parent)
        _remove_abandoned(above, kind)
        made = Path(tempfile.mkdtemp(prefix="slipstream-", dir=above))
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        try_lock(lock)
        # renamed when it is locked, so that no other process sees it abandoned
        self.path = made.rename(above / made.name.replace("slipstream-", f"slipstream-{kind}-", 1))
        self._end = weakref.finalize(self, _remove, self.path, lock)

    def cleanup(self) -> None:
        """Removes the folder, once."""
        self._end()


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(above: Path, kind: str) -> None:
    """Removes the folders of this kind and user that no process has locked."""
    for path in above.glob(f"slipstream-{kind}-*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # it was removed, or belongs to another user
            continue
        if os.fstat(lock).st_uid == os.getuid() and try_lock(lock):
            _remove(path, lock)
        else:
            os.close(lock)
