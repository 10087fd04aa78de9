"""PlanRing: messages of rank 0 to the other ranks of the same host, through shared memory.

The writer copies a message once; every reader maps the same memory. A byte in a pipe announces each message, and
a byte back acknowledges it: the pipes order the accesses to the memory, let readers sleep, and report the end of the
other side. The ring is as large as the largest message that one step can have, several times.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from slipstream.base.errors import EngineDead
from slipstream.contracts.step import (
    AdapterPlan,
    Admission,
    DrawBias,
    DrawEdits,
    EmbedPlan,
    Ints,
    LogitsEdit,
    PageUpdates,
    PoolPlan,
    PromptScores,
    SitOut,
    StatePlan,
    StepPlan,
    StepSizes,
    TierPlan,
)

RING_BYTES = 2**26
_HEADER = 8  # bytes of a message's length; 0: the next message is at the start of the ring


@dataclass(frozen=True, slots=True)
class ReaderFiles:
    """File descriptors that a reader inherits."""

    memory: int
    messages: int  # a byte per message
    acknowledgements: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.memory, self.messages, self.acknowledgements))


class PlanWriter:
    def __init__(self, num_readers: int, size: int = RING_BYTES) -> None:
        self._memory = os.memfd_create("slipstream-plans")
        os.ftruncate(self._memory, size)
        self._size = size
        self._map = mmap.mmap(self._memory, size)
        self._readers = [_ReaderEnd(self._memory) for _ in range(num_readers)]
        self._next = 0  # offset of the next message
        self._unread: deque[int] = deque()  # sizes of the messages that some reader has not acknowledged
        self._num_unread_bytes = 0

    @property
    def files(self) -> list[ReaderFiles]:
        """The file descriptors that each reader inherits. `close_inherited` closes them here."""
        return [reader.files for reader in self._readers]

    def close_inherited(self) -> None:
        for reader in self._readers:
            os.close(reader.files.messages)
            os.close(reader.files.acknowledgements)

    def write(self, kind: bytes, data: bytes = b"") -> None:
        """Sends a message to all readers. `kind` is one byte. Raises EngineDead if a reader has ended."""
        length = len(data) + 1
        needed = _HEADER + length
        if needed > self._size // 2:
            raise EngineDead(f"a step has {length} bytes, {self._size // 2} can be sent to other ranks")
        skipped = 0
        if self._next + needed + _HEADER > self._size:  # there is always room for a header at the end
            skipped = self._size - self._next
        while self._num_unread_bytes + needed + skipped > self._size - _HEADER:
            self._wait_for_readers()
        if skipped:
            self._map[self._next : self._next + _HEADER] = bytes(_HEADER)
            self._next = 0
        start = self._next
        self._map[start : start + _HEADER] = length.to_bytes(_HEADER, "little")
        self._map[start + _HEADER : start + _HEADER + 1] = kind
        self._map[start + _HEADER + 1 : start + needed] = data
        self._next = start + needed
        self._unread.append(needed + skipped)
        self._num_unread_bytes += needed + skipped
        for index, reader in enumerate(self._readers):
            reader.announce(index + 1)

    def wait_until_ready(self) -> int | None:
        """Waits until every reader has called `ready`. Returns the rank of a reader that has ended instead; None: all
        are ready."""
        for index, reader in enumerate(self._readers):
            while not reader.num_acknowledged:
                if not reader.read_acknowledgements(wait=True):
                    return index + 1
            reader.num_acknowledged -= 1
        return None

    def close(self) -> None:
        for reader in self._readers:
            os.close(reader.announced)
            os.close(reader.acknowledged)
        self._map.close()
        os.close(self._memory)

    def _wait_for_readers(self) -> None:
        for index, reader in enumerate(self._readers):
            while not reader.num_acknowledged:
                if not reader.read_acknowledgements(wait=True):
                    raise EngineDead(f"rank {index + 1} has ended")
        for reader in self._readers:
            reader.num_acknowledged -= 1
        self._num_unread_bytes -= self._unread.popleft()


class _ReaderEnd:
    """The writer's side of one reader."""

    def __init__(self, memory: int) -> None:
        messages, self.announced = os.pipe()
        self.acknowledged, acknowledgements = os.pipe()
        self.files = ReaderFiles(memory, messages, acknowledgements)
        self.num_acknowledged = 0
        os.set_blocking(self.acknowledged, False)
        self._poll = select.poll()
        self._poll.register(self.acknowledged, select.POLLIN)

    def announce(self, rank: int) -> None:
        try:
            os.write(self.announced, b"m")
        except BrokenPipeError:
            raise EngineDead(f"rank {rank} has ended") from None
        self.read_acknowledgements(wait=False)

    def read_acknowledgements(self, *, wait: bool) -> bool:
        """False: the reader has ended."""
        if wait:
            self._poll.poll()
        try:
            data = os.read(self.acknowledged, 2**12)
        except BlockingIOError:
            return True
        self.num_acknowledged += len(data)
        return bool(data)


class PlanReader:
    def __init__(self, memory: int, messages: int, acknowledgements: int) -> None:
        self._map = mmap.mmap(memory, 0)
        self._messages = messages
        self._acknowledgements = acknowledgements
        self._next = 0

    def ready(self) -> None:
        """Notifies the writer that this rank has started."""
        os.write(self._acknowledgements, b"a")

    def read(self) -> tuple[bytes, bytes] | None:
        """The kind and the data of the next message; None: the writer has ended."""
        if not os.read(self._messages, 1):
            return None
        if (length := self._length()) == 0:
            self._next = 0
            length = self._length()
        start = self._next + _HEADER
        message = self._map[start : start + length]  # a copy
        self._next = start + length
        with contextlib.suppress(BrokenPipeError):  # the writer has ended; its last messages are still read
            os.write(self._acknowledgements, b"a")
        return message[:1], message[1:]

    def _length(self) -> int:
        return int.from_bytes(self._map[self._next : self._next + _HEADER], "little")


# Plans as bytes: integers of all arrays in one block, then msgpack of the rare fields. Pickle is never used.
#
# A decode step has no admissions, scores, pooling or copies of states, so its plan is one concatenation.

_ARRAYS = ("released", "rows", "num_tokens", "lengths", "num_drawn", "num_host_tokens", "tokens", "following")
_CODEC_HEADER = 7  # integers before the lengths of the arrays
_NONE = -1
_Rest = tuple[
    tuple[Admission, ...],
    PromptScores | None,
    PoolPlan | None,
    StatePlan | None,
    AdapterPlan | None,
    StepSizes | None,
    EmbedPlan | None,
    TierPlan | None,
    Ints | None,
]
_EditedRows = tuple[tuple[int, ...], bool, bool]  # rows, is_scaled and is_batched of a LogitsEdit
_LateFields = tuple[Ints, Ints, DrawBias | None, Ints | None, SitOut | None, tuple[_EditedRows, ...]]


def _as_bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


def _from_bytes(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_encode = msgspec.msgpack.Encoder(enc_hook=_as_bytes).encode
_decode_rest = msgspec.msgpack.Decoder(_Rest, dec_hook=_from_bytes).decode
_decode_late = msgspec.msgpack.Decoder(_LateFields, dec_hook=_from_bytes).decode


def encode_plan(plan: StepPlan) -> bytes:
    arrays = [getattr(plan, name) for name in _ARRAYS]
    for pages in plan.new_pages:
        arrays += (pages.rows, pages.entries, pages.pages)
    arrays.append(plan.copies.reshape(-1))
    shared = plan.adapters, plan.joint_sizes, plan.embeds, plan.tier, plan.catch_up
    parts = (plan.scores, plan.pooling, plan.states, *shared)
    has_rest = bool(plan.admitted) or any(part is not None for part in parts)
    rest = _encode((plan.admitted, *parts)) if has_rest else b""
    header = [
        plan.step & 0x7FFFFFFF,
        plan.step >> 31,
        len(plan.new_pages),
        _NONE if plan.num_logprobs is None else plan.num_logprobs,
        plan.has_drafts | plan.returns_drafts << 1,
        plan.num_proposed,
        len(rest),
        *map(len, arrays),
    ]
    return np.concatenate([np.array(header, np.int32), *arrays], dtype=np.int32).tobytes() + rest


def decode_plan(data: bytes) -> StepPlan:
    """The arrays are views of `data`."""
    header = np.frombuffer(data, np.int32, _CODEC_HEADER).tolist()
    num_arrays = len(_ARRAYS) + 3 * header[2] + 1
    sizes = np.frombuffer(data, np.int32, num_arrays, 4 * _CODEC_HEADER).tolist()
    start = 4 * (_CODEC_HEADER + num_arrays)
    arrays = []
    for size in sizes:
        arrays.append(np.frombuffer(data, np.int32, size, start))
        start += 4 * size
    fixed: dict[str, Any] = dict(zip(_ARRAYS, arrays, strict=False))
    groups = arrays[len(_ARRAYS) : -1]
    rest: Any = ((), *[None] * 8) if not header[6] else _decode_rest(memoryview(data)[start:])
    return StepPlan(
        step=header[0] | header[1] << 31,
        **fixed,
        new_pages=tuple(PageUpdates(*groups[index : index + 3]) for index in range(0, len(groups), 3)),
        copies=arrays[-1].reshape(-1, 3),
        num_logprobs=None if header[3] == _NONE else header[3],
        has_drafts=bool(header[4] & 1),
        returns_drafts=bool(header[4] & 2),
        num_proposed=header[5],
        admitted=rest[0],
        scores=rest[1],
        pooling=rest[2],
        states=rest[3],
        adapters=rest[4],
        joint_sizes=rest[5],
        embeds=rest[6],
        tier=rest[7],
        catch_up=rest[8],
    )


def encode_tier(plan: TierPlan) -> bytes:
    return _encode(plan)


decode_tier = msgspec.msgpack.Decoder(TierPlan, dec_hook=_from_bytes).decode


def encode_draw_edits(late: DrawEdits) -> bytes:
    edits = [(edit.rows, edit.is_scaled, edit.is_batched) for edit in late.edits]  # the code stays here
    return _encode((late.rows, late.bits, late.bias, late.offsets, late.sit_out, edits))


def decode_draw_edits(data: bytes) -> DrawEdits:
    rows, bits, bias, offsets, sit_out, edited = _decode_late(data)
    edits = tuple(
        LogitsEdit(rows_of, _not_here, _not_here, is_scaled, is_batched) for rows_of, is_scaled, is_batched in edited
    )
    return DrawEdits(rows, bits, bias, edits, offsets, sit_out=sit_out)


def _not_here(value: object) -> Any:
    raise AssertionError("code that edits logits runs on rank 0 only")


# Plans over sockets: messages of rank 0 to ranks of other nodes, with the interface of PlanRing.


class PlanSockets:
    """The writer's side: one socket per rank, in the order of ranks, the first for rank 1."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = list(socks)

    def write(self, kind: bytes, data: bytes = b"") -> None:
        message = b"".join([(len(data) + 1).to_bytes(_HEADER, "little"), kind, data])
        for index, sock in enumerate(self._socks):
            try:
                sock.sendall(message)
            except OSError:
                raise EngineDead(f"rank {index + 1} has ended") from None

    def wait_until_ready(self) -> int | None:
        """Waits until every reader has called `ready`. Returns a rank that has ended instead; None: all are ready."""
        for index, sock in enumerate(self._socks):
            try:
                if not sock.recv(1):
                    return index + 1
            except OSError:
                return index + 1
        return None

    def ended(self, seconds: float) -> int | None:
        """A rank whose connection has ended; waits up to `seconds` for one. Ranks send nothing once they are ready."""
        readable, _, _ = select.select(self._socks, [], [], seconds)
        return self._socks.index(readable[0]) + 1 if readable else None

    def wait_until_ended(self, seconds: float) -> None:
        """Waits until all connections have ended, `seconds` at most."""
        deadline = time.monotonic() + seconds
        for sock in self._socks:
            select.select([sock], [], [], max(0.0, deadline - time.monotonic()))

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when a connection ends."""
        return [sock.fileno() for sock in self._socks]

    def hang_up(self) -> None:
        """Ends the connections. `close` releases them."""
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


class PlanSocketReader:
    def __init__(self, sock: socket.socket, receive: Callable[[socket.socket, int], bytes | None]) -> None:
        """`receive` reads a number of bytes; None: the connection has ended."""
        self._sock = sock
        self._receive = receive

    def ready(self) -> None:
        """Notifies the writer that this rank has started."""
        self._sock.sendall(b"a")

    def read(self) -> tuple[bytes, bytes] | None:
        """The kind and the data of the next message; None: the writer has ended."""
        header = self._receive(self._sock, _HEADER)
        message = None if header is None else self._receive(self._sock, int.from_bytes(header, "little"))
        return None if message is None else (message[:1], message[1:])
