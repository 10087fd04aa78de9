"""Peer: connections to the page server of another engine, or of one of its ranks; and how leased pages are received."""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from slipstream.engine.page_wire import HEADER, Greeting, Leased, checksum, receive, receive_into, receive_message
from slipstream.engine.shared_pages import MappedMemory

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 1.0


class TargetMemory(Protocol):
    def memory_of(self, group: int, slot: int) -> memoryview: ...


class PeerConnection(NamedTuple):
    socket: socket.socket
    memory: MappedMemory | None  # of the peer, if it is on this host


class Peer:
    """Threads take a connection each."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.rests_until = 0.0  # on the clock of time.monotonic: it has failed
        self._idle: queue.SimpleQueue[PeerConnection] = queue.SimpleQueue()
        self._mapped: tuple[str, MappedMemory | None] = "", None  # the name of the peer's memory

    def open(self, deadline: float) -> PeerConnection:
        """Raises OSError, or MsgspecError if the peer is something else."""
        while True:
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                break
            if _is_alive(connection.socket):
                return connection
            connection.socket.close()  # the peer was started again
        left = min(deadline - time.monotonic(), _CONNECT_SECONDS)
        if left <= 0:
            raise TimeoutError("the peer is late")
        sock = socket.create_connection(self.address, left)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = receive_message(sock, Greeting, time.monotonic() + left)
        except BaseException:
            sock.close()
            raise
        return PeerConnection(sock, self._map(greeting.memory))

    def _map(self, name: str) -> MappedMemory | None:
        known, memory = self._mapped
        if name != known:
            try:
                memory = MappedMemory(name)
            except OSError:  # of another host
                memory = None
            self._mapped = name, memory
        return memory

    def keep(self, connection: PeerConnection) -> None:
        self._idle.put(connection)

    def close(self) -> None:
        while True:
            try:
                self._idle.get_nowait().socket.close()
            except queue.Empty:
                return


def receive_pages(
    connection: PeerConnection,
    leased: Sequence[Leased],
    slots: Sequence[int],
    memory: TargetMemory,
    arrived: list[bool],
    deadline: float,
) -> None:
    """Write leased pages to own slots, and set `arrived` for those that are right. Raises OSError."""
    for index, (page, slot) in enumerate(zip(leased, slots, strict=True)):
        size, expected = HEADER.unpack(receive(connection.socket, HEADER.size, deadline))
        if not size:
            continue
        target = memory.memory_of(page.group, slot)
        if size != len(target):
            raise ConnectionError(f"a page has {size} bytes, and {len(target)} here")
        if connection.memory is None:
            receive_into(connection.socket, target, deadline)
        else:
            # numpy copies without the interpreter lock, memoryview with it
            np.copyto(
                np.frombuffer(target, np.uint8), np.frombuffer(connection.memory.page(page.group, page.slot), np.uint8)
            )
        arrived[index] = checksum(page.page_hash, target) == expected
        if not arrived[index]:
            log.warning("a page arrived with a wrong checksum, so it is computed")


def _is_alive(connection: socket.socket) -> bool:
    """Whether an idle connection can be used: the peer has sent nothing, not even its end."""
    connection.settimeout(0)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
