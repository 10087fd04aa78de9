"""Pages of one engine that another engine of the same host and user reads from shared memory.

The slots of the second cache tier are files in memory. MemoryServer gives these files to processes that connect to its
Unix socket, whose random name is in the handshake of the TCP server: a connection succeeds on the same host (strictly:
in the same network namespace) only. MappedMemory is the other side. The files can be read there, not written. Where
the slots have a copy in device memory, its handle travels the same way (PeerSlots).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from slipstream.handoff.wire import HEADER, Leased, receive

if TYPE_CHECKING:
    from slipstream.device.peer_memory import PeerMemory


log = logging.getLogger(__name__)

_CONNECT_SECONDS = 1.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MAX_FILES = 128


class _Slots(msgspec.Struct, array_like=True):
    """Beside the files."""

    page_bytes: list[int]  # by group
    handle: bytes = b""  # of the device memory with a copy of the slots; empty: there is none
    starts: list[int] = []  # the first bytes of the groups there


class MemoryServer:
    def __init__(self, files: Sequence[tuple[int, int]], mirror: DeviceSlots | None = None) -> None:
        """`files`: by group of pages, a descriptor and the bytes of a page."""
        self.name = f"slipstream-pages-{secrets.token_hex(16)}"
        self._files = files
        self._mirror = mirror
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, name="slipstream-page-files", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, files: Sequence[tuple[int, int]], mirror: DeviceSlots | None = None) -> MemoryServer | None:
        """None: there are no such files."""
        return cls(files, mirror) if 0 < len(files) <= _MAX_FILES else None

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_CONNECT_SECONDS)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                    socket.send_fds(connection, [self._slots()], [file for file, _ in self._files])

    def _slots(self) -> bytes:
        slots = _Slots([page_bytes for _, page_bytes in self._files])
        if self._mirror is not None:
            try:
                slots.handle, slots.starts = self._mirror.give_handle(), self._mirror.starts
            except OSError as error:
                log.warning("pages do not pass from device to device: %s", error)
        return msgspec.msgpack.encode(slots)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class MappedMemory:
    """The slots of an engine of this host."""

    def __init__(self, name: str) -> None:
        """`name`: of its MemoryServer. Raises OSError if it is on another host, or of another user."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(_address(name))
            data, files, _, _ = socket.recv_fds(connection, 2**12, _MAX_FILES)
        if not data or not files:
            raise ConnectionError("the memory of pages is not shared with this process")
        slots = msgspec.msgpack.decode(data, type=_Slots)
        self.page_bytes, self.handle, self.starts = slots.page_bytes, slots.handle, slots.starts
        self._maps = []
        for file in files:
            self._maps.append(memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ)))
            os.close(file)

    def page(self, group: int, slot: int) -> memoryview:
        """Raises ConnectionError if the peer shares no such page."""
        if group >= min(len(self.page_bytes), len(self._maps)):
            raise ConnectionError(f"group {group} is not in the memory of the peer")
        size = self.page_bytes[group]
        page = self._maps[group][slot * size : (slot + 1) * size]
        if len(page) != size:
            raise ConnectionError(f"slot {slot} is not in the memory of the peer")
        return page


def _address(name: str) -> str:
    return f"\0{name}"  # an abstract address: it has no file and ends with its socket


# Pages that pass from device to device: the consumer's device copies them from the memory of the producer's.
#
# No checksum is computed. A checksum would find bytes of a slot that was overwritten while it was copied; that cannot
# happen under a lease, so pages count only if the producer says after the copies that the lease still holds (LEASED of
# `wire.py`). A lease that ended before, a producer that is gone or started again: the prompt is computed.

_POLL = 0.0005  # seconds between two looks at a copy that is not done
_BATCH = 64  # pages whose copies are queued together


class DeviceCopies(Protocol):
    def done(self) -> bool: ...


class DeviceSlots(Protocol):
    """The part of `SlotMirror` that threads use."""

    starts: list[int]

    def give_handle(self) -> bytes: ...
    def is_written(self, group: int, slot: int, num_stores: int) -> bool: ...
    def is_on_device(self, group: int, slot: int) -> bool: ...
    def is_in_host(self, group: int, slot: int) -> bool: ...
    def open_peer(self, handle: bytes) -> PeerMemory: ...
    def copy_from(self, peer: PeerMemory, group: int, copies: Sequence[tuple[int, int]]) -> DeviceCopies: ...
    def set_arrived(self, group: int, slot: int, *, on_device: bool) -> None: ...


class SharedSlots(Protocol):
    """The part of `MappedMemory` that says where the peer's slots are."""

    page_bytes: list[int]
    handle: bytes
    starts: list[int]

    def page(self, group: int, slot: int) -> memoryview: ...


class PeerSlots:
    """The slots of an engine of this host, in the memory of its device."""

    def __init__(self, shared: SharedSlots, own: DeviceSlots) -> None:
        """Raises OSError if this process cannot open the memory."""
        if not shared.handle or len(shared.starts) != len(shared.page_bytes):
            raise ConnectionError("the peer shares no device memory")
        self._shared = shared
        self._own = own
        self._memory = own.open_peer(shared.handle)

    def receive(
        self,
        connection: socket.socket,
        leased: Sequence[Leased],
        slots: Sequence[int],
        sizes: Sequence[int],
        arrived: list[bool],
        deadline: float,
    ) -> None:
        """Copy leased pages to own slots of these sizes, and set `arrived`. Raises OSError. When it ends, so have all
        copies: no slot is written after its reservation."""
        copies: list[DeviceCopies] = []
        try:
            for first in range(0, len(leased), _BATCH):
                part = range(first, min(first + _BATCH, len(leased)))
                ready = [index for index in part if self._is_ready(connection, sizes[index], deadline)]
                for group in {leased[index].group for index in ready}:
                    of_group = [index for index in ready if leased[index].group == group]
                    chosen = [(self._first_byte(leased[index]), slots[index]) for index in of_group]
                    copies.append(self._own.copy_from(self._memory, group, chosen))
                for index in ready:
                    self._own.set_arrived(leased[index].group, slots[index], on_device=True)
                    arrived[index] = True
        finally:
            for each in copies:
                while not each.done():
                    time.sleep(_POLL)

    def _is_ready(self, connection: socket.socket, size: int, deadline: float) -> bool:
        """Whether the producer has the next page, of this size, on its device."""
        found, _ = HEADER.unpack(receive(connection, HEADER.size, deadline))
        if found and found != size:
            raise ConnectionError(f"a page has {found} bytes, and {size} here")
        return bool(found)

    def _first_byte(self, page: Leased) -> int:
        """Raises ConnectionError if the peer shares no such page."""
        size = len(self._shared.page(page.group, page.slot))
        return self._shared.starts[page.group] + page.slot * size
