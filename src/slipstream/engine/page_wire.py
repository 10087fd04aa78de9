"""The protocol by which engines exchange KV cache pages over TCP.

A consumer sends a question: a length and a msgpack object. The producer answers with a byte that says whether both
engines store the same pages for the same hashes, then for each page of the question in order a header (size and
checksum, 0 for a page that it does not have) and the bytes of the page. A connection has any number of questions.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import time
import zlib

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.engine.record_file import fingerprint

LENGTH = struct.Struct("<I")
HEADER = struct.Struct("<QI")  # bytes of the page, checksum
SAME, OTHER = b"\x01", b"\x00"
MAX_QUESTION = 2**26  # bytes


class Question(msgspec.Struct, array_like=True):
    identity: str
    timeout: float  # seconds that the producer may take
    pages: list[tuple[int, bytes]]  # group and hash


decode_question = msgspec.msgpack.Decoder(Question).decode
encode_question = msgspec.msgpack.Encoder().encode


def checksum(page_hash: bytes, content: memoryview | bytes) -> int:
    """Of a page under this hash: bytes of another page have another checksum."""
    return zlib.crc32(content, zlib.crc32(page_hash))


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
