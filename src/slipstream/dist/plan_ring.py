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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.base.errors import EngineDead

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
