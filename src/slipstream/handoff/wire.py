"""The protocol by which engines exchange KV cache pages over TCP.

A producer opens every connection with a Handshake. A consumer sends questions: a length and a msgpack object. The
producer answers with a byte that says whether both engines store the same pages for the same hashes. Then comes a
Lease: the slots of the pages, which keep their content until the end of the question; and for each page of the lease in
order a header (size and checksum, 0 for a page that is late) and the bytes of the page. A connection has any number of
questions.

Where several ranks share a model, every rank has a part of each page. The question goes to rank 0, which has the index;
each rank of the consumer sends the lease to the same rank of the producer, and gets its part of the pages. Rank 0 of
the consumer sends DONE when all its ranks have received their parts.

A consumer that has mapped the producer's memory or opened its device's (`shared_pages.py`), asks
for headers alone, and also sends DONE. The producer answers DONE with LEASED while the pages still are. Pages that came
from device memory count only then: they have no checksum, and what was read under a lease was not overwritten.
"""

from __future__ import annotations

import enum
import hashlib
import socket
import struct
import time
import zlib
from typing import Any, TypeVar

import msgspec
import numpy as np

from slipstream.config.config import EngineConfig
from slipstream.record.record_file import fingerprint

LENGTH = struct.Struct("<I")
HEADER = struct.Struct("<QI")  # bytes of the page, checksum
OTHER_MODEL, SAME, OTHER_RANKS = b"\x00", b"\x01", b"\x02"
DONE, LEASED = b"d", b"h"
MAX_MESSAGE = 2**26  # bytes
_BLOCK = 2048  # bytes of a page that are added to the sums at once

T = TypeVar("T")


class PageTransport(enum.Enum):
    """The way in which bytes of pages travel."""

    TCP = "tcp"
    MEMORY = "memory"  # the consumer reads the producer's host memory
    DEVICE = "device"  # the consumer's device copies from the memory of the producer's


class Handshake(msgspec.Struct, array_like=True):
    memory: str  # name of the socket that gives the producer's memory to processes of the same host; "": none


class Question(msgspec.Struct, array_like=True):
    identity: str
    num_ranks: int
    timeout: float  # seconds that the producer may take
    pages: list[tuple[int, bytes]]  # group and hash
    transport: PageTransport = PageTransport.TCP


class Leased(msgspec.Struct, array_like=True, frozen=True):
    """A slot of the producer."""

    group: int
    slot: int
    num_stores: int  # to the slot, the one with the page among them
    page_hash: bytes


class Lease(msgspec.Struct, array_like=True):
    indices: list[int]  # of the pages in the question
    pages: list[Leased]
    ranks: list[tuple[str, int]] = []  # where the ranks above 0 serve their parts; "": at the host of rank 0
    token: bytes = b""  # proves to them that rank 0 gave the lease


class ShardQuestion(msgspec.Struct, array_like=True):
    """The question of a rank above 0, for its part of pages."""

    identity: str
    rank: int
    timeout: float
    pages: list[Leased]
    token: bytes
    transport: PageTransport = PageTransport.TCP


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


def receive_message(connection: socket.socket, kind: type[T], deadline: float) -> T:
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
