"""PageListener: a TCP server of pages, with a thread for each connection; and how leased pages are sent."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import msgspec

from slipstream.engine.page_wire import HEADER, Greeting, Leased, checksum, send_message
from slipstream.engine.shared_pages import MemoryServer
from slipstream.errors import InvalidOption

MAX_CONNECTIONS = 64
POLL = 0.001  # seconds between two looks at a copy that is not done
IDLE = 3600.0  # seconds that a connection may wait for its next question


class PageMemory(Protocol):
    """The part of `PageTier` that threads use."""

    def is_stored(self, group: int, slot: int, num_stores: int) -> bool: ...
    def memory_of(self, group: int, slot: int) -> memoryview: ...
    def shared_files(self) -> Sequence[tuple[int, int]]: ...


class PageListener(ABC):
    def __init__(self, address: tuple[str, int], identity: str, memory: PageMemory) -> None:
        """`identity`: of this engine's pages. Raises InvalidOption if the address cannot be used."""
        self.identity = identity
        self.memory = memory
        try:
            self._listener = socket.create_server(address)
        except OSError as error:
            raise InvalidOption(f"pages cannot be served at {address[0]}:{address[1]}: {error}") from None
        self.port: int = self._listener.getsockname()[1]
        self._shared = MemoryServer.open(memory.shared_files())
        self._greeting = Greeting("" if self._shared is None else self._shared.name)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.is_closed = False
        self._thread = threading.Thread(target=self._accept, name="slipstream-pages", daemon=True)
        self._thread.start()

    @abstractmethod
    def answer(self, connection: socket.socket) -> None:
        """Read a question, and answer it. Raises OSError or MsgspecError to end the connection."""

    def close(self) -> None:
        self.is_closed = True
        if self._shared is not None:
            self._shared.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while not self.is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if len(self._connections) >= MAX_CONNECTIONS or self.is_closed:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="slipstream-pages", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_message(connection, self._greeting)
            while not self.is_closed:
                self.answer(connection)
        except (OSError, msgspec.MsgspecError):
            pass  # the peer has gone, is late, or sends something else: it computes its prompt
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def send(self, connection: socket.socket, page: Leased, deadline: float, *, is_mapped: bool) -> None:
        """Send the header and, unless the peer has mapped the memory, the bytes of a page, once its store is done."""
        while not self.memory.is_stored(page.group, page.slot, page.num_stores):
            if self.is_closed or time.monotonic() > deadline:
                connection.sendall(HEADER.pack(0, 0))
                return
            time.sleep(POLL)
        content = self.memory.memory_of(page.group, page.slot)
        connection.settimeout(max(deadline - time.monotonic(), POLL))
        connection.sendall(HEADER.pack(len(content), checksum(page.page_hash, content)))
        if not is_mapped:
            connection.sendall(content)


def deadline_of(timeout: float) -> float:
    """On the clock of time.monotonic; `timeout`: what a peer has sent."""
    return time.monotonic() + min(max(timeout if math.isfinite(timeout) else 0.0, 0.0), 600.0)
