"""SharedCounters: shared memory to which several front ends write their counts, so that each can report the total.

Each front end writes to its own part, and no process waits. A reader that reads during a write uses its last reading.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from typing import TypeVar

import msgspec

from slipstream.metrics.stats import FrontEnds, FrontStats, added

T = TypeVar("T", FrontStats, FrontEnds)

_SEGMENT = 2**20  # bytes per front end; only pages that are written use memory
_HEADER = 8  # bytes: length and checksum


class SharedCounters:
    def __init__(self, fd: int, own: int, count: int) -> None:
        """For front end `own` of `count`; `own == count` is the supervisor.

        A front end that replaces one that died continues its counts, so that no counter decreases.
        """
        self._memory = mmap.mmap(fd, _SEGMENT * (count + 1))
        self.own = own
        self.count = count
        self._known = [FrontStats() for _ in range(count)]
        found = self._read(own, FrontStats) if own < count else None
        self._before = None if found is None else found.without_gauges()

    @staticmethod
    def create(count: int) -> int:
        """A file without a name, for processes that inherit it."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("slipstream-metrics")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SEGMENT * (count + 1))
        return fd

    def write(self, stats: FrontStats) -> None:
        if self._before is not None:
            stats = added(self._before, stats)
        self._known[self.own] = stats
        self._write(stats)

    def write_front_ends(self, front_ends: FrontEnds) -> None:
        """Called by the supervisor."""
        self._write(front_ends)

    def total(self) -> FrontStats:
        for process in range(self.count):
            if process != self.own and (found := self._read(process, FrontStats)) is not None:
                self._known[process] = found
        return added(FrontStats(), *self._known)

    def front_ends(self) -> FrontEnds:
        """The counts that the supervisor wrote last."""
        return self._read(self.count, FrontEnds) or FrontEnds(self.count, self.count)

    def _write(self, value: FrontStats | FrontEnds) -> None:
        payload = msgspec.msgpack.encode(value)
        if len(payload) > _SEGMENT - _HEADER:
            return  # more routes and models than can exist
        header = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little")
        start = self.own * _SEGMENT
        self._memory[start : start + _HEADER + len(payload)] = header + payload

    def _read(self, process: int, kind: type[T]) -> T | None:
        start = process * _SEGMENT
        header = self._memory[start : start + _HEADER]
        length = int.from_bytes(header[:4], "little")
        if not 0 < length <= _SEGMENT - _HEADER:
            return None
        payload = self._memory[start + _HEADER : start + _HEADER + length]
        if zlib.crc32(payload) != int.from_bytes(header[4:], "little"):
            return None  # a write is in progress
        return msgspec.msgpack.decode(payload, type=kind)
