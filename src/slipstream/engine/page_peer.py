"""Peer: connections to the page server of another engine, or of one of its ranks; and how leased pages are received."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from slipstream.engine.device_pages import DeviceSlots, PeerSlots
from slipstream.engine.page_wire import (
    HEADER,
    Handshake,
    Leased,
    PageTransport,
    checksum,
    receive,
    receive_into,
    receive_message,
)
from slipstream.engine.shared_pages import MappedMemory

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 1.0


class TargetMemory(Protocol):
    @property
    def mirror(self) -> DeviceSlots | None: ...
    def memory_of(self, group: int, slot: int) -> memoryview: ...


class PeerConnection(NamedTuple):
    socket: socket.socket
    memory: MappedMemory | None  # of the peer, if it is on this host
    device: PeerSlots | None = None  # the same in the memory of its device, if this one can reach it

    @property
    def transport(self) -> PageTransport:
        if self.device is not None:
            return PageTransport.DEVICE
        return PageTransport.TCP if self.memory is None else PageTransport.MEMORY


class Peer:
    """Threads take a connection each."""

    def __init__(self, address: tuple[str, int], mirror: DeviceSlots | None = None) -> None:
        """`mirror`: own slots of the device; None: pages do not pass from device to device."""
        self.address = address
        self._mirror = mirror
        self.rests_until = 0.0  # on the clock of time.monotonic: it has failed
        self._idle: queue.SimpleQueue[PeerConnection] = queue.SimpleQueue()
        # the name of the peer's memory, and where it is
        self._mapped: tuple[str, MappedMemory | None, PeerSlots | None] = "", None, None
        self._mapping = threading.Lock()

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
            handshake = receive_message(sock, Handshake, time.monotonic() + left)
        except BaseException:
            sock.close()
            raise
        with self._mapping:
            return PeerConnection(sock, *self._map(handshake.memory))

    def _map(self, name: str) -> tuple[MappedMemory | None, PeerSlots | None]:
        known, memory, device = self._mapped
        if name != known:
            memory = device = None
            try:
                memory = MappedMemory(name)
                device = None if self._mirror is None else PeerSlots(memory, self._mirror)
            except OSError as error:  # of another host, or on a device that this one cannot reach
                if memory is not None:
                    log.warning("pages of %s:%d do not pass from device to device: %s", *self.address, error)
            self._mapped = name, memory, device
        return memory, device

    def keep(self, connection: PeerConnection) -> None:
        self._idle.put(connection)

    def close(self) -> None:
        with self._mapping:
            self._mapped = "", None, None  # closes the memory, once no thread reads it
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
    if connection.device is not None:
        sizes = [len(memory.memory_of(page.group, slot)) for page, slot in zip(leased, slots, strict=True)]
        connection.device.receive(connection.socket, leased, slots, sizes, arrived, deadline)
        return
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
        if memory.mirror is not None:
            memory.mirror.set_arrived(page.group, slot, on_device=False)
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
