"""Pages that pass from device to device: the consumer's device copies them from the memory of the producer's.

No checksum is computed. A checksum would find bytes of a slot that was overwritten while it was copied; that cannot
happen under a lease, so pages count only if the producer says after the copies that the lease still holds (HELD of
`page_wire.py`). A lease that ended before, a producer that is gone or started again: the prompt is computed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from slipstream.engine.page_wire import HEADER, Leased, receive

if TYPE_CHECKING:
    from slipstream.device.peer_memory import PeerMemory  # imports torch

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
