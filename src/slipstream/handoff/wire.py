"""The protocol by which engines exchange KV cache pages over TCP.

Every rank of a model has a part of each page, serves it, and fetches it from the same rank of another engine. A
producer opens every connection with a Handshake. Questions are a length and a msgpack object; a connection has any
number of them.

Rank 0, which has the index, asks (Ask) rank 0 of the producer. The answer is a byte that says whether both engines
store the same pages for the same hashes, then a Lease: the slots of the pages, which keep their content until the end
of the question. Each rank of the consumer takes its part (Take): for each page of the lease in order it gets a header
(size and checksum, 0 for a page that is late) and the bytes of the page. Where a consumer has mapped the producer's
memory, or opened its device's (`shared_pages.py`), it takes headers alone. When all ranks have their parts, rank 0
sends DONE, which is answered with LEASED while the pages still are. Pages that came from device memory count only then:
they have no checksum, and what was read under a lease was not overwritten.
"""

from __future__ import annotations

import enum
import hashlib
import socket
import struct
import time
import zlib
from typing import Any

import msgspec
import numpy as np

from slipstream.config.config import EngineConfig
from slipstream.record.record_file import fingerprint

LENGTH = struct.Struct("<I")
HEADER = struct.Struct("<QI")  # bytes of the page, checksum
REFUSED, GRANTED, OTHER_RANKS = b"\x00", b"\x01", b"\x02"
DONE, LEASED = b"d", b"h"
MAX_MESSAGE = 2**26  # bytes
_BLOCK = 2048  # bytes of a page that are added to the sums at once


class PageTransport(enum.Enum):
    """The way in which bytes of pages travel."""

    TCP = "tcp"
    MEMORY = "memory"  # the consumer reads the producer's host memory
    DEVICE = "device"  # the consumer's device copies from the memory of the producer's


class Handshake(msgspec.Struct, array_like=True):
    memory: str  # name of the socket that gives the producer's memory to processes of the same host; "": none


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Of rank 0: which pages are there?"""

    identity: str
    num_ranks: int
    timeout: float  # seconds that the producer may take
    pages: list[tuple[int, bytes]]  # group and hash


class Leased(msgspec.Struct, array_like=True, frozen=True):
    """A slot of the producer."""

    group: int
    slot: int
    num_stores: int  # to the slot, the one with the page among them
    page_hash: bytes


class Lease(msgspec.Struct, array_like=True):
    indices: list[int]  # of the pages in the question
    pages: list[Leased]
    others: list[tuple[str, int]]  # where the ranks above 0 serve their parts; "": at the host of rank 0
    token: bytes  # proves to all ranks that rank 0 gave the lease


class Take(msgspec.Struct, array_like=True, tag="take"):
    """Of every rank: its part of leased pages."""

    rank: int
    timeout: float
    pages: list[Leased]
    token: bytes
    transport: PageTransport


def sign(secret: bytes, pages: list[Leased]) -> bytes:
    """The token of a lease: only rank 0 knows which pages are in the slots."""
    return hashlib.blake2b(msgspec.msgpack.encode(pages), key=secret, digest_size=16).digest()


def checksum(page_hash: bytes, content: memoryview | bytes) -> int:
    """Checksum of a page under this hash: bytes of another page have another checksum. It is the CRC of sums over
    blocks: five times as fast as the CRC of all bytes. It misses blocks in another order, and differences that cancel
    in a sum."""
    blocks = np.frombuffer(content, np.uint8)
    whole = len(blocks) // _BLOCK * _BLOCK
    sums = np.add.reduce(blocks[:whole].view(np.uint64).reshape(-1, _BLOCK // 8), axis=0)
    return zlib.crc32(sums.data, zlib.crc32(blocks[whole:].data, zlib.crc32(page_hash)))


def identity_of(config: EngineConfig) -> str:
    """Equal for two engines that store the same bytes under the same page hashes: weights, dtypes and layout."""
    model, cache = config.model, config.cache
    fields = (
        fingerprint(config),
        model.dtype,
        model.dequantize,
        model.quantization,
        cache.page_size,
        cache.groups,
        cache.drops_last_page,
        None if cache.states is None else (cache.states.specs, cache.states.border),
        config.scheduler.drafts is None,
        None if config.draft is None else (config.draft.method, config.draft.model.path),
    )
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16).hexdigest()


def send_message(connection: socket.socket, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket, kind: Any, deadline: float) -> Any:
    """Raises OSError, or MsgspecError if the message is another one."""
    (size,) = LENGTH.unpack(receive(connection, LENGTH.size, deadline))
    if size > MAX_MESSAGE:
        raise ConnectionError(f"a message of {size} bytes is too long")
    return msgspec.msgpack.decode(receive(connection, size, deadline), type=kind)


def receive_into(connection: socket.socket, target: memoryview, deadline: float) -> None:
    """Fill `target`. Raises OSError if the peer ends the connection or is late."""
    done = 0
    while done < len(target):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer is late")
        connection.settimeout(left)
        count = connection.recv_into(target[done:])
        if not count:
            raise ConnectionError("the peer ended the connection")
        done += count


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    content = bytearray(size)
    receive_into(connection, memoryview(content), deadline)
    return bytes(content)
