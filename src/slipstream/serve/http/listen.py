"""The port of a server: claimed for this server alone, then shared by the listeners of its front ends."""

from __future__ import annotations

import socket

from slipstream.errors import InvalidOption
from slipstream.serve.http.listen_unix import UnixClaim
from slipstream.serve.http.settings import ServerSettings

_MAX_FILES = 2**20
_BACKLOG = 2048  # connections that wait until a front end is up


def claim(settings: ServerSettings) -> PortClaim | UnixClaim:
    """The place where this server listens. Raises InvalidOption where it is taken."""
    return PortClaim(settings) if settings.uds is None else UnixClaim(settings.uds)


class PortClaim:
    """Listening sockets on one port. The system spreads connections over those that are open.

    SO_REUSEPORT lets any process of the same user join a port, so two servers that bind with it would share the port
    without noticing. The first socket therefore binds and listens without it, which fails where anybody listens, and
    gets it afterwards, for our own other listeners.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Raises InvalidOption where the port is taken."""
        self._host = settings.host
        self._first: socket.socket | None = _bound(settings.host, settings.port, shared=False)
        self.port: int = self._first.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.shown = f"{'http' if settings.ssl_certfile is None else 'https'}://{host}:{self.port}"
        if settings.workers > 1:
            self._first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def listener(self, *, listens: bool = True) -> socket.socket:
        """A socket on the port that the caller owns. One that does not listen yet gets no connections."""
        first, self._first = self._first, None
        return _bound(self._host, self.port, shared=True, listens=listens) if first is None else first

    def close(self) -> None:
        """Nothing is left behind: a port is free once its sockets are closed."""
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
            sock.listen(_BACKLOG)  # two sockets may be bound to one port until one of them listens
    except (OSError, OverflowError) as error:
        sock.close()
        raise InvalidOption(f"cannot listen on {host} port {port}: {error}; choose another host or port") from None
    return sock


def raise_file_limit() -> None:
    """Every client is an open file, and many systems begin with 1024 of them; more may be had for the asking."""
    try:
        import resource  # not everywhere
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
