"""PageServer: sends pages of the second cache tier to other engines, by their hashes.

Each connection has a thread, which reads the tier's memory. A page is pinned while it is sent, so its slot keeps its
content. A page that is about to be stored is waited for; all others that the tier does not have are misses.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from typing import Protocol

import msgspec

from slipstream.engine.page_wire import (
    HEADER,
    LENGTH,
    MAX_QUESTION,
    OTHER,
    SAME,
    Question,
    checksum,
    decode_question,
    receive,
)
from slipstream.errors import InvalidOption
from slipstream.scheduler.cache.tier import CacheTier, Stored

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_POLL = 0.001  # seconds between two looks at a copy that is not done
_IDLE = 3600.0  # seconds that a connection may wait for its next question


class PageMemory(Protocol):
    """The part of `PageTier` that threads use."""

    def is_stored(self, group: int, slot: int, num_stores: int) -> bool: ...
    def memory_of(self, group: int, slot: int) -> memoryview: ...


class PageServer:
    def __init__(self, address: tuple[str, int], identity: str, tier: CacheTier, memory: PageMemory) -> None:
        """`identity`: of this engine's pages. Raises InvalidOption if the address cannot be used."""
        self._identity = identity
        self._tier = tier
        self._memory = memory
        self._num_groups = tier.num_groups
        try:
            self._listener = socket.create_server(address)
        except OSError as error:
            raise InvalidOption(f"pages cannot be served at {address[0]}:{address[1]}: {error}") from None
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="slipstream-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if len(self._connections) >= MAX_CONNECTIONS or self._is_closed:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="slipstream-pages", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._is_closed:
                (size,) = LENGTH.unpack(receive(connection, LENGTH.size, time.monotonic() + _IDLE))
                if size > MAX_QUESTION:
                    return
                question = decode_question(receive(connection, size, time.monotonic() + _IDLE))
                self._answer(connection, question)
        except (OSError, msgspec.MsgspecError):
            pass  # the peer has gone, is late, or sends something else: it computes its prompt
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, question: Question) -> None:
        if question.identity != self._identity:
            connection.sendall(OTHER)
            return
        timeout = question.timeout if math.isfinite(question.timeout) else 0.0
        deadline = time.monotonic() + min(max(timeout, 0.0), 600.0)
        connection.sendall(SAME)
        for group, page_hash in question.pages:
            stored = self._find(group, page_hash, deadline) if 0 <= group < self._num_groups else None
            if stored is None:
                connection.sendall(HEADER.pack(0, 0))
                continue
            try:
                self._send(connection, stored, page_hash, deadline)
            finally:
                self._tier.unpin(stored)

    def _find(self, group: int, page_hash: bytes, deadline: float) -> Stored | None:
        """The pinned slot of a page, once its store is done; None: a miss."""
        while True:
            is_pending = self._tier.is_pending(group, page_hash)  # before `pin`: it may be stored in between
            stored = self._tier.pin(group, page_hash)
            if stored is not None:
                break
            if not is_pending or self._is_closed or time.monotonic() > deadline:
                return None
            time.sleep(_POLL)
        while not self._memory.is_stored(*stored):
            if self._is_closed or time.monotonic() > deadline:
                self._tier.unpin(stored)
                return None
            time.sleep(_POLL)
        return stored

    def _send(self, connection: socket.socket, stored: Stored, page_hash: bytes, deadline: float) -> None:
        content = self._memory.memory_of(stored.group, stored.slot)
        connection.settimeout(max(deadline - time.monotonic(), _POLL))
        connection.sendall(HEADER.pack(len(content), checksum(page_hash, content)))
        connection.sendall(content)
