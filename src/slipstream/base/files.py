"""Locks between processes on files and folders; a lock ends with its file descriptor, so also with its process."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process has the lock of this file, which is created, and has it meanwhile."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(file: int) -> bool:
    """False: another process has the lock, or the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# OwnedFolder: a temporary folder that does not outlive its process, even one that is killed.
#
# A process that ends removes its folder. One that is killed cannot, so the next one does: the folder is locked as long
# as its process runs, and a folder without a lock is removed when another of its kind is made. Where the content is
# private, a guard removes it at once. It imports no torch.

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


# Reads the files of a model's or adapter's folder: regular files of a bounded size, and JSON in them.
#
# A folder comes from elsewhere: reading a pipe would wait for ever, and a device such as /dev/zero never ends.

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
    text = read_utf8(path)
    try:
        found = json.loads(text)
        # half of a surrogate pair is no text: libraries would raise later, without the file's name
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:  # no ValueError, which callers turn into an error that names the file
        raise ValueError("it is nested too deeply") from None
