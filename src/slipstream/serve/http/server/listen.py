"""PortClaim: binds a TCP port for this server exclusively, and shares it among the listeners of its front ends."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import TYPE_CHECKING, NoReturn

from slipstream.base.errors import InvalidOption
from slipstream.serve.http.server.settings import ServerSettings

if TYPE_CHECKING:
    import ssl


_MAX_FILES = 2**20
_BACKLOG = 2048  # connections queued until a front end is up


def claim(settings: ServerSettings) -> PortClaim | UnixClaim:
    """Binds the address of this server. Raises InvalidOption where it is in use."""
    return PortClaim(settings) if settings.uds is None else UnixClaim(settings.uds)


class PortClaim:
    """Listening sockets on one port, over which the kernel distributes connections.

    With SO_REUSEPORT any process of the same user can bind the port, so two servers would share it without an error.
    The first socket therefore binds and listens without the option, which fails if the port is in use, and sets the
    option afterwards, for the other listeners of this server.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Raises InvalidOption where the port is in use."""
        self._host = settings.host
        self._first: socket.socket | None = _bound(settings.host, settings.port, shared=False)
        self.port: int = self._first.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.shown = f"{'http' if settings.ssl_certfile is None else 'https'}://{host}:{self.port}"
        if settings.workers > 1:
            self._first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def listener(self, *, listens: bool = True) -> socket.socket:
        """Returns a socket on the port, owned by the caller. Without `listens` it gets no connections yet."""
        first, self._first = self._first, None
        return _bound(self._host, self.port, shared=True, listens=listens) if first is None else first

    def close(self) -> None:
        """Closes the first socket where `listener` has not returned it."""
        if self._first is not None:
            self._first.close()


def _bound(host: str, port: int, *, shared: bool, listens: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        if listens:
            sock.listen(_BACKLOG)  # two sockets can bind one port as long as neither listens
    except (OSError, OverflowError) as error:
        sock.close()
        raise InvalidOption(f"cannot listen on {host} port {port}: {error}; choose another host or port") from None
    return sock


def raise_file_limit() -> None:
    """Raises the soft limit of open files, which is often 1024, to the hard limit: each client needs one."""
    try:
        import resource  # not on all systems
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# UnixClaim: binds a unix socket for this server exclusively, shares it among its front ends, and removes the file.


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


# Loads the certificate of an https server.

HANDSHAKE_SECONDS = 15.0  # a connection with a longer handshake is closed


def server_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Returns None for a plain HTTP server. Raises InvalidOption for files that cannot be used."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise InvalidOption("ssl_keyfile is given without ssl_certfile; give the certificate too")
        return None
    import ssl  # loads OpenSSL

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and up
    context.set_alpn_protocols(["http/1.1"])
    shown = f"ssl_certfile {settings.ssl_certfile}"
    if settings.ssl_keyfile is not None:
        shown += f" and ssl_keyfile {settings.ssl_keyfile}"
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise InvalidOption(f"{shown} cannot be used: {reason}; give a certificate and its key in PEM format") from None
    return context


def _no_password() -> NoReturn:
    """Replaces OpenSSL's prompt at the terminal, which would block a server without one."""
    raise InvalidOption("ssl_keyfile is encrypted; give the key without a password, in a file that others cannot read")
