"""Devices of the CPU whose memory other processes can open: files stand in for CUDA IPC.

The copies of a peer run in a thread of their own, which `PeerDevice.gate` stops, so that they are as late as a test
wants them to be.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import torch

from delayed_device import DelayedDevice
from slipstream.device.device import Device
from slipstream.device.peer_memory import ByteCopy, joined


class FileExport:
    def __init__(self, num_bytes: int) -> None:
        self.file = os.memfd_create("device")
        os.ftruncate(self.file, num_bytes)
        self.tensor = torch.frombuffer(mmap.mmap(self.file, num_bytes), dtype=torch.uint8)
        self.is_closed = False

    def give_handle(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self.file}".encode()

    def close(self) -> None:
        self.is_closed = True


class FilePeer:
    def __init__(self, handle: bytes, gate: threading.Event) -> None:
        with open(handle, "rb") as file:
            self.memory = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        self.gate = gate
        self.num_bytes = 0  # copied

    def copy(self, pieces: Sequence[ByteCopy], target: torch.Tensor) -> FileCopies:
        copies = FileCopies(self, joined(pieces), memoryview(target.numpy()))
        copies.start()
        return copies


class FileCopies(threading.Thread):
    def __init__(self, peer: FilePeer, pieces: list[ByteCopy], target: memoryview) -> None:
        super().__init__(daemon=True)
        self.peer, self.pieces, self.target = peer, pieces, target

    def run(self) -> None:
        self.peer.gate.wait()
        for source, to, size in self.pieces:
            self.target[to : to + size] = self.peer.memory[source : source + size]
            self.peer.num_bytes += size

    def done(self) -> bool:
        return not self.is_alive()


class Exporting:
    """Of a device; see above."""

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self.gate = threading.Event()
        self.gate.set()
        self.peers: list[FilePeer] = []

    def export_memory(self, num_bytes: int) -> FileExport:
        return FileExport(num_bytes)

    def open_memory(self, handle: bytes) -> FilePeer:
        self.peers.append(FilePeer(handle, self.gate))
        return self.peers[-1]

    @property
    def num_received(self) -> int:
        """Bytes of pages that came from devices of other engines."""
        return sum(peer.num_bytes for peer in self.peers)


class PeerDevice(Exporting, Device):
    """Work runs in a thread, or at once at depth 0."""


class LatePeerDevice(Exporting, DelayedDevice):
    """Streams are late at random."""
