"""A unix socket that a server listens on: claimed for it alone, shared by its front ends, removed at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from slipstream.errors import InvalidOption

_BACKLOG = 2048  # connections that wait until a front end is up


class UnixClaim:
    """One listening socket. Every front end has a descriptor of it, and whichever is free takes the next connection.

    The file has the mode that the process's umask leaves; who may write to it may connect.
    """

    def __init__(self, path: str) -> None:
        """Raises InvalidOption where another server listens, or something else is there."""
        self._path = path
        self.shown = f"unix:{path}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            self._sock.bind(path)
            self._sock.listen(_BACKLOG)
            self._inode = os.stat(path).st_ino
        except (OSError, ValueError) as error:  # ValueError: a null byte
            self._sock.close()
            reason = getattr(error, "strerror", None) or error
            raise InvalidOption(f"cannot listen on the unix socket {path}: {reason}; choose another path") from None
        except InvalidOption:
            self._sock.close()
            raise

    def listener(self, *, listens: bool = True) -> socket.socket:
        """A listening socket that the caller owns. It is one queue for all, so it listens in any case."""
        return self._sock.dup()

    def close(self) -> None:
        """Removes the file, unless another server's has taken its place."""
        self._sock.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def _remove_stale(path: str) -> None:
    """A server that was killed leaves its file behind."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidOption(f"uds is {path}, which is there and no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise InvalidOption(f"another server listens on {path}; choose another path, or end that one")
