"""Hand-off of pages where several ranks share a model: every rank sends and fetches its own part of each page.

Rank 0 has the index. As a producer it leases slots, and the other ranks serve them (`ShardServer`). As a consumer it
passes a lease on to the other ranks (`RankPages`), each of which asks the same rank of the producer (`ShardPages`).
Plans say when a slot is free on a rank: rank 0 writes a mark between two plans when it reserves slots, and a rank
fetches after all copies before the latest mark. A rank ends each transfer at its deadline, and rank 0 waits for that:
no slot is written after its reservation.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.device.collectives import Group
from slipstream.handoff.client import ClientMemory, Copies, Peer, receive_pages
from slipstream.handoff.server import IDLE, PageListener, PageMemory, deadline_of
from slipstream.handoff.wire import (
    LENGTH,
    OTHER_MODEL,
    SAME,
    Lease,
    Leased,
    ShardQuestion,
    identity_of,
    receive,
    receive_message,
    send_message,
)
from slipstream.ranks.link import SECRET_BYTES, accept_ranks, join_rank, receive_exactly
from slipstream.scheduler.cache.imports import NUM_THREADS

log = logging.getLogger(__name__)

_KEY = "slipstream-pages"  # in the store of the ranks
_CONNECT_SECONDS = 120.0
_REST_SECONDS = 5.0  # that a peer which failed is not asked
_POLL = 0.0005

T = TypeVar("T")


class _Rendezvous(msgspec.Struct, array_like=True):
    """The address of rank 0 at which the other ranks connect."""

    host: str
    port: int
    secret: bytes


class _Fetch(msgspec.Struct, array_like=True):
    """From rank 0 to another rank."""

    mark: int  # copies before this mark must be done
    address: tuple[str, int]  # of the same rank of the producer
    timeout: float  # seconds
    pages: list[Leased]
    slots: list[int]  # own ones, by page
    token: bytes


class RankPages:
    """The other ranks, for rank 0."""

    def __init__(self, group: Group, write_mark: Callable[[], None]) -> None:
        """`write_mark` sends a mark to all other ranks, between two plans. Waits until they have connected."""
        self.num_ranks = group.size
        self._write_mark = write_mark
        self._num_marks = 0
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._links: list[queue.SimpleQueue[socket.socket]] = [queue.SimpleQueue() for _ in range(1, self.num_ranks)]
        self._all: list[socket.socket] = []
        found: dict[int, tuple[str, int]] = {}
        with socket.create_server((group.address, 0)) as listener:
            rendezvous = _Rendezvous(group.address, listener.getsockname()[1], self._secret)
            group.store.set(_KEY, msgspec.msgpack.encode(rendezvous))
            numbers = range(NUM_THREADS, NUM_THREADS * self.num_ranks)
            for number, link in accept_ranks(listener, self._secret, numbers, _CONNECT_SECONDS).items():
                rank = number // NUM_THREADS
                found[rank] = receive_message(link, tuple[str, int], time.monotonic() + _CONNECT_SECONDS)
                self._links[rank - 1].put(link)
                self._all.append(link)
        self.addresses = [found[rank] for rank in range(1, self.num_ranks)]

    def sign(self, pages: list[Leased]) -> bytes:
        return _sign(self._secret, pages)

    def mark(self) -> None:
        self._num_marks += 1
        self._write_mark()

    def start(self, host: str, lease: Lease, slots: Sequence[int], deadline: float) -> _Transfers:
        links = []
        for rank, (own_host, port) in enumerate(lease.ranks, 1):
            link = self._links[rank - 1].get()  # there is one for each thread
            left = max(deadline - time.monotonic(), 0.0)
            fetch = _Fetch(self._num_marks, (own_host or host, port), left, lease.pages, list(slots), lease.token)
            link.settimeout(None)
            send_message(link, fetch)
            links.append(link)
        return _Transfers(links, self._links, len(lease.pages))

    def close(self) -> None:
        for link in self._all:
            link.close()


class _Transfers:
    def __init__(
        self, links: Sequence[socket.socket], idle: Sequence[queue.SimpleQueue[socket.socket]], num_pages: int
    ) -> None:
        self._links = links
        self._idle = idle
        self._num_pages = num_pages

    def wait(self) -> list[bool]:
        arrived = [True] * self._num_pages
        for link, idle in zip(self._links, self._idle, strict=True):
            answer = _receive(link, list[bool])
            if answer is None:  # the rank has ended, and so will the engine
                answer = [False] * self._num_pages
            arrived = [here and there for here, there in zip(arrived, answer, strict=True)]
            idle.put(link)
        return arrived


class ShardPages:
    """One of the other ranks: serves its parts of pages, and fetches them when rank 0 says so."""

    def __init__(self, config: EngineConfig, group: Group, memory: ClientMemory) -> None:
        assert config.transfer is not None
        self._rank = group.rank
        self._identity = identity_of(config)
        self._memory = memory
        self._peers: dict[tuple[str, int], Peer] = {}
        self._last: tuple[int, Copies] = 0, memory.mark()  # the latest mark
        rendezvous = msgspec.msgpack.decode(group.store.get(_KEY), type=_Rendezvous)
        address = "", 0
        self.server: ShardServer | None = None
        if config.transfer.listen is not None:
            is_local = group.address == rendezvous.host
            host, port = config.transfer.listen
            own = host if is_local else group.address, port + self._rank if port else 0
            self.server = ShardServer(own, self._identity, self._rank, memory, rendezvous.secret)
            address = "" if is_local else group.address, self.server.port
        for number in range(NUM_THREADS):
            of_link = self._rank * NUM_THREADS + number
            link = join_rank((rendezvous.host, rendezvous.port), rendezvous.secret, of_link)
            send_message(link, address)
            threading.Thread(target=self._serve, args=(link,), name="slipstream-fetch", daemon=True).start()

    def mark(self) -> None:
        """Called between two plans."""
        self._last = self._last[0] + 1, self._memory.mark()

    def _serve(self, link: socket.socket) -> None:
        while (fetch := _receive(link, _Fetch)) is not None:
            link.settimeout(None)
            send_message(link, self._fetch(fetch))

    def _fetch(self, fetch: _Fetch) -> list[bool]:
        """Which pages arrived."""
        arrived = [False] * len(fetch.pages)
        deadline = time.monotonic() + fetch.timeout
        peer = self._peers.setdefault(fetch.address, Peer(fetch.address, self._memory.mirror))
        if time.monotonic() < peer.rests_until or not self._wait_for_copies(fetch.mark, deadline):
            return arrived
        try:
            self._ask(peer, fetch, arrived, deadline)
        except (OSError, msgspec.MsgspecError) as error:
            peer.rests_until = time.monotonic() + _REST_SECONDS
            log.warning("pages of %s:%d did not arrive on rank %d: %s", *peer.address, self._rank, error)
        return arrived

    def _wait_for_copies(self, mark: int, deadline: float) -> bool:
        while True:
            number, copies = self._last
            if number >= mark and copies.done():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)

    def _ask(self, peer: Peer, fetch: _Fetch, arrived: list[bool], deadline: float) -> None:
        connection = peer.open(deadline)
        try:
            left = max(deadline - time.monotonic(), 0.0)
            connection.socket.settimeout(max(left, _POLL))
            question = ShardQuestion(self._identity, self._rank, left, fetch.pages, fetch.token, connection.transport)
            send_message(connection.socket, question)
            if receive(connection.socket, 1, deadline) != SAME:
                raise ConnectionError("it has another model, dtype or layout of pages, or is another rank")
            receive_pages(connection, fetch.pages, fetch.slots, self._memory, arrived, deadline)
        except BaseException:
            connection.socket.close()
            raise
        peer.keep(connection)


class ShardServer(PageListener):
    """Sends one rank's parts of the pages that its rank 0 has leased."""

    def __init__(self, address: tuple[str, int], identity: str, rank: int, memory: PageMemory, secret: bytes) -> None:
        self._rank = rank
        self._secret = secret
        super().__init__(address, identity, memory)

    def answer(self, connection: socket.socket) -> None:
        question = receive_message(connection, ShardQuestion, time.monotonic() + IDLE)
        is_same = question.identity == self.identity and question.rank == self._rank
        if not is_same or not hmac.compare_digest(question.token, _sign(self._secret, question.pages)):
            connection.sendall(OTHER_MODEL)
            return
        deadline = deadline_of(question.timeout)
        connection.sendall(SAME)
        for page in question.pages:
            self.send(connection, page, deadline, transport=question.transport)


def _sign(secret: bytes, pages: list[Leased]) -> bytes:
    """A proof that rank 0 leased these pages: the other ranks do not know which pages are in their slots."""
    return hashlib.blake2b(msgspec.msgpack.encode(pages), key=secret, digest_size=16).digest()


def _receive(link: socket.socket, kind: type[T]) -> T | None:
    """The next message, without a time limit; None: the other side has ended."""
    link.settimeout(None)
    header = receive_exactly(link, LENGTH.size)
    data = None if header is None else receive_exactly(link, LENGTH.unpack(header)[0])
    return None if data is None else msgspec.msgpack.decode(data, type=kind)
