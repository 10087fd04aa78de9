"""PortClaim: binds a TCP port for this server exclusively, and shares it among the listeners of its front ends."""

from __future__ import annotations

import socket

from slipstream.base.errors import InvalidOption
from slipstream.serve.http.listen_unix import UnixClaim
from slipstream.serve.http.settings import ServerSettings

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
