"""OwnedFolder: a temporary folder that does not outlive its process, even one that is killed.

A process that ends removes its folder. One that is killed cannot, so the next one does: the folder is locked as long as
its process runs, and a folder without a lock is removed when another of its kind is made. Where the content is private,
a guard removes it at once. It imports no torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import weakref
from pathlib import Path
from typing import NoReturn

from slipstream.file_lock import try_lock

_TRIES = 50


class OwnedFolder:
    def __init__(self, kind: str, parent: str | None = None) -> None:
        """`parent`: of the folder; None: the folder of temporary files."""
        above = Path(tempfile.gettempdir() if parent is None else parent)
        _remove_abandoned(above, kind)
        made = Path(tempfile.mkdtemp(prefix="slipstream-", dir=above))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        try_lock(self._lock)
        # renamed when it is locked, so that no other process sees it abandoned
        self.path = made.rename(above / made.name.replace("slipstream-", f"slipstream-{kind}-", 1))
        self._end = weakref.finalize(self, _remove, self.path, self._lock)

    def guard(self) -> None:
        """Starts a process that removes the folder as soon as this one is killed. It is a fork, so call this before
        threads are started."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _remove_at_end(ours, self.path)
        os.close(ours)
        self._end.detach()
        self._end = weakref.finalize(self, _remove, self.path, self._lock, (theirs, pid))

    def cleanup(self) -> None:
        """Removes the folder, once."""
        self._end()


def _remove(path: Path, lock: int, guard: tuple[int, int] | None = None) -> None:
    """`guard`: the pipe that it reads, and its process id."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    if guard is not None:
        os.close(guard[0])
        os.waitpid(guard[1], 0)


def _remove_at_end(pipe: int, path: Path) -> NoReturn:
    """In the guard: waits until the owner has ended, and removes the folder."""
    try:
        os.setsid()  # signals to the owner's process group do not end it
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for first, end in ((0, pipe), (pipe + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(first, end)  # else ports and sockets would stay open
        os.read(pipe, 1)
        for _ in range(_TRIES):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                break
            time.sleep(0.1)  # the owner's other processes end too, and may have created a file
    finally:
        os._exit(0)


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
