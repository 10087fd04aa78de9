"""UnixClaim: binds a unix socket for this server exclusively, shares it among its front ends, and removes the file."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from slipstream.base.errors import InvalidOption

_BACKLOG = 2048  # connections queued until a front end is up


class UnixClaim:
    """One listening socket. Every front end has a descriptor of it, and the first free one accepts a connection.

    The umask of the process sets the mode of the file; write permission allows to connect.
    """

    def __init__(self, path: str) -> None:
        """Raises InvalidOption where another server listens, or the path is not a socket."""
        self._path = path
        self.shown = f"unix:{path}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            self._sock.bind(path)
            self._sock.listen(_BACKLOG)
            self._inode = os.stat(path).st_ino
        except InvalidOption:  # a ValueError too
            self._sock.close()
            raise
        except (OSError, ValueError) as error:  # ValueError: a null byte
            self._sock.close()
            reason = getattr(error, "strerror", None) or error
            raise InvalidOption(f"cannot listen on the unix socket {path}: {reason}; choose another path") from None

    def listener(self, *, listens: bool = True) -> socket.socket:
        """Returns a socket owned by the caller. All share one queue, so it listens regardless of `listens`."""
        return self._sock.dup()

    def close(self) -> None:
        """Removes the file, unless another server has replaced it."""
        self._sock.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def _remove_stale(path: str) -> None:
    """Removes the file of a server that was killed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidOption(f"uds is {path}, which exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise InvalidOption(f"another server listens on {path}; choose another path, or stop that server")
