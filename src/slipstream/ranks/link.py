"""RankLink: how ranks of other nodes reach rank 0, and what each gets from it. It imports no torch."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.contracts.step import Handle

SECRET_BYTES = 32
_RANK_BYTES = 4
_HELLO_SECONDS = 10.0  # for a connection to send its secret


class RankLink(msgspec.Struct, frozen=True):
    listener: int  # file descriptor of a listening socket, which the core inherits
    secret: bytes  # the first bytes of a connection; others are closed


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank, as msgpack."""

    config: EngineConfig
    store_address: str  # of the torch.distributed store on the node of rank 0
    store_port: int


def join_rank(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    """Connects a rank with rank 0."""
    sock = open_socket(address)
    sock.sendall(secret + rank.to_bytes(_RANK_BYTES, "little"))
    return sock


def accept_rank(listener: socket.socket, secret: bytes) -> tuple[int, socket.socket]:
    """Returns the next rank that connects, and its socket. Raises TimeoutError after the listener's timeout."""
    while True:
        sock, _ = listener.accept()
        try:
            sock.settimeout(_HELLO_SECONDS)
            hello = receive_exactly(sock, SECRET_BYTES + _RANK_BYTES)
        except OSError:
            hello = None
        if hello is not None and hmac.compare_digest(hello[:SECRET_BYTES], secret):
            sock.settimeout(None)
            keep_alive(sock)
            return int.from_bytes(hello[SECRET_BYTES:], "little"), sock
        sock.close()


def open_socket(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, timeout=60.0)
    sock.settimeout(None)
    keep_alive(sock)
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Ends the connection about 30 s after the other node has lost power or network, and sends small messages at
    once."""
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


# RankWatch: a thread that waits for the end of another process with a part of the model.

CLOSED_BY_PEER = getattr(select, "POLLRDHUP", select.POLLHUP)
"""Event of a socket whose other end was closed, whether or not data was read."""
_CLOSE_SECONDS = 5.0


class RankWatch:
    def __init__(self, files: Sequence[int], on_end: Callable[[], None], event: int = select.POLLIN) -> None:
        """`files`: each has `event` when a process ends. `on_end` is called in the thread, once, for the first."""
        self._on_end = on_end
        self._stopped, self._stops = os.pipe()
        self._poll = select.poll()
        for file in files:
            self._poll.register(file, event)
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


def wait_for_step(handle: Handle | None) -> None:
    """Waits for the newest step of an engine that closes, a few seconds at most: other ranks must not lose this one's
    memory while they compute with it."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    with contextlib.suppress(Exception):  # the step has failed, and its error was raised where it was waited for
        while handle is not None and not handle.done() and time.monotonic() < deadline:
            time.sleep(0.001)
