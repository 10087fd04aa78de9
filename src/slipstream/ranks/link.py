"""RankLink, RankSocket: how ranks reach rank 0 on this host or another, and what they send each other. No torch."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from slipstream.base.errors import EngineDead
from slipstream.config.config import EngineConfig
from slipstream.contracts.step import Handle

SECRET_BYTES = 32
_RANK_BYTES = 4
_HELLO_SECONDS = 10.0  # for a connection to send its secret
_LENGTH_BYTES = 8
Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


class RankLink(msgspec.Struct, frozen=True):
    listener: int  # file descriptor of a listening socket, which the core inherits
    secret: bytes  # the first bytes of a connection; others are closed


class RankStart(msgspec.Struct, frozen=True):
    """The data of the first message to a rank."""

    config: EngineConfig
    address: str  # of rank 0
    store: str | int  # in which the ranks find each other: a file, or the port of a TCPStore at the address of rank 0
    secret: bytes  # of the ranks, for the exchange of pages with other engines


START, PLAN, FINISH, LATE, FREE, ADAPTER, TIER, FETCH, END = b"s", b"p", b"f", b"l", b"q", b"a", b"t", b"m", b"e"
"""Kinds of messages to a rank."""
READY, FETCHED = b"r", b"g"
"""Kinds of messages to rank 0: the rank has loaded its part; an answer to FETCH."""
STARTED = "started/{}"
"""What a rank sends when it needs the store no longer: where it serves its parts of pages."""


class RankSocket:
    """One side of the connection between rank 0 and another rank: messages of a kind, one byte, and data."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        sock.set_inheritable(False)  # the other side must see the end of this process, whatever it has started

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """From any thread. Raises OSError if the connection has ended."""
        message = b"".join([(len(data) + 1).to_bytes(_LENGTH_BYTES, "little"), kind, data])
        with self._sending:
            self.sock.sendall(message)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The kind and the data of the next message; None: the connection has ended."""
        header = receive_exactly(self.sock, _LENGTH_BYTES)
        message = None if header is None else receive_exactly(self.sock, int.from_bytes(header, "little"))
        return None if message is None else (message[:1], message[1:])


def join_rank(address: Address, secret: bytes, rank: int) -> socket.socket:
    """Connects a rank with another one."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address)
    else:
        sock = socket.create_connection(address, timeout=60.0)
        sock.settimeout(None)
        keep_alive(sock)
    sock.sendall(secret + rank.to_bytes(_RANK_BYTES, "little"))
    return sock


def accept_ranks(
    listener: socket.socket, secret: bytes, ranks: Collection[int], seconds: float
) -> dict[int, socket.socket]:
    """The connections of these ranks, for each of which there are so many `seconds`. Raises EngineDead."""
    found: dict[int, socket.socket] = {}
    listener.settimeout(seconds)
    while missing := sorted(set(ranks) - set(found)):
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            raise EngineDead(f"ranks {missing} did not connect within {seconds:g} s") from None
        try:
            sock.settimeout(_HELLO_SECONDS)
            hello = receive_exactly(sock, len(secret) + _RANK_BYTES)
        except OSError:
            hello = None
        if hello is None or not hmac.compare_digest(hello[: len(secret)], secret):
            sock.close()
            continue
        sock.settimeout(None)
        keep_alive(sock)
        found[int.from_bytes(hello[len(secret) :], "little")] = sock
    return found


def keep_alive(sock: socket.socket) -> None:
    """Ends the connection about 30 s after the other node has lost power or network, and sends small messages at
    once."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """None: the connection has ended."""
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(min(size - len(data), 2**20))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


# The end of another process with a part of the model.

_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)
"""Event of a socket whose other end was closed, whether or not data was read."""
_CLOSE_SECONDS = 5.0


class RankWatch:
    """A thread that waits for the end of another process."""

    def __init__(self, files: Sequence[int], on_end: Callable[[], None]) -> None:
        """`files`: sockets. `on_end` is called in the thread, once, for the first whose other end is closed."""
        self._on_end = on_end
        self._stopped, self._stops = os.pipe()
        self._poll = select.poll()
        for file in files:
            self._poll.register(file, _CLOSED)
        self._poll.register(self._stopped, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="slipstream-rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        os.write(self._stops, b"s")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._stops)
        os.close(self._stopped)

    def _run(self) -> None:
        ready = {file for file, _ in self._poll.poll()}
        if self._stopped not in ready:
            self._on_end()


def ended_within(files: Sequence[int], seconds: float) -> list[int]:
    """Indices of these sockets whose other end was closed. Waits for the first, so many `seconds` at most."""
    poll = select.poll()
    for file in files:
        poll.register(file, _CLOSED)
    ready = {file for file, _ in poll.poll(1000.0 * seconds)} if files else set()
    return [index for index, file in enumerate(files) if file in ready]


def wait_for_step(handle: Handle | None) -> None:
    """Waits for the newest step of an engine that closes, a few seconds at most: other ranks must not lose this one's
    memory while they compute with it."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    with contextlib.suppress(Exception):  # the step has failed, and its error was raised where it was waited for
        while handle is not None and not handle.done() and time.monotonic() < deadline:
            time.sleep(0.001)
