"""PageClient: fetches pages from other engines over TCP, into slots of the second cache tier.

Peers are asked one after another for the pages that are still missing. Bytes are received into the pinned memory of
their slots. A page counts as arrived if its checksum is right; whatever else happens is a miss.
"""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.engine.page_server import PageMemory
from slipstream.engine.page_wire import HEADER, LENGTH, SAME, Question, checksum, encode_question, receive, receive_into
from slipstream.scheduler.cache.tier_slots import Reserved

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 1.0
_REST_SECONDS = 5.0  # that a peer which failed is not asked
_POLL = 0.0005


class Copies(Protocol):
    """Copies of the device that were queued before some moment."""

    def done(self) -> bool: ...


class ClientMemory(PageMemory, Protocol):
    def mark(self) -> Copies: ...


class PageClient:
    """A `PageSource`."""

    def __init__(self, peers: Sequence[tuple[str, int]], identity: str, memory: ClientMemory) -> None:
        self._peers = [_Peer(address) for address in peers]
        self._identity = identity
        self._memory = memory

    def prepare(self) -> Callable[[], bool]:
        return self._memory.mark().done

    def fetch(self, pages: Sequence[Reserved], is_free: Callable[[], bool], deadline: float) -> list[bool]:
        arrived = [False] * len(pages)
        while not is_free():
            if time.monotonic() > deadline:
                return arrived
            time.sleep(_POLL)
        for peer in self._peers:
            missing = [index for index, has_arrived in enumerate(arrived) if not has_arrived]
            if not missing:
                break
            if time.monotonic() < peer.rests_until:
                continue
            try:
                self._ask(peer, pages, missing, arrived, deadline)
            except OSError as error:
                peer.rests_until = time.monotonic() + _REST_SECONDS
                log.warning("pages of %s:%d did not arrive, so prompts are computed: %s", *peer.address, error)
        return arrived

    def _ask(
        self, peer: _Peer, pages: Sequence[Reserved], missing: Sequence[int], arrived: list[bool], deadline: float
    ) -> None:
        """Set `arrived` for pages that this peer sends. Raises OSError."""
        connection = peer.open()
        try:
            wanted = [(pages[index].group, pages[index].page_hash) for index in missing]
            question = encode_question(Question(self._identity, max(deadline - time.monotonic(), 0.0), wanted))
            connection.settimeout(max(deadline - time.monotonic(), _POLL))
            connection.sendall(LENGTH.pack(len(question)) + question)
            if receive(connection, 1, deadline) != SAME:
                raise ConnectionError("it has another model, dtype or layout of pages")
            for index in missing:
                arrived[index] = self._receive_page(connection, pages[index], deadline)
        except BaseException:
            connection.close()
            raise
        peer.keep(connection)

    def _receive_page(self, connection: socket.socket, page: Reserved, deadline: float) -> bool:
        size, expected = HEADER.unpack(receive(connection, HEADER.size, deadline))
        if not size:
            return False
        memory = self._memory.memory_of(page.group, page.slot)
        if size != len(memory):
            raise ConnectionError(f"a page has {size} bytes, and {len(memory)} here")
        receive_into(connection, memory, deadline)
        if checksum(page.page_hash, memory) == expected:
            return True
        log.warning("a page arrived with a wrong checksum, so it is computed")
        return False

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class _Peer:
    """Connections to one engine. Threads take one each."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.rests_until = 0.0
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def open(self) -> socket.socket:
        while True:
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                break
            if _is_alive(connection):
                return connection
            connection.close()  # the peer was started again
        connection = socket.create_connection(self.address, _CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def keep(self, connection: socket.socket) -> None:
        self._idle.put(connection)

    def close(self) -> None:
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return


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
