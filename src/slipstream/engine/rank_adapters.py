"""LoRA adapters of a model that several ranks share: every rank reads its part of an adapter from the same folder.

Rank 0 reads first, in the thread that reads adapters, so an adapter that cannot be used is refused before other ranks
read it. The other ranks get messages in order with the plans: each reads in a thread of its own, and a plan that copies
the adapter to the device waits for that.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from slipstream.base.files import open_regular
from slipstream.contracts.step import StepPlan


class AdapterMemory(Protocol):
    """The part of `AdapterStore` that is used here."""

    def read(self, buffer: int, path: str) -> bytes: ...
    def load(self, slot: int, buffer: int) -> None: ...


class AdapterMessage(msgspec.Struct, array_like=True):
    buffer: int
    path: str = ""  # read this folder into the buffer
    slot: int = -1  # or copy the buffer to this slot


encode_message = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(AdapterMessage).decode


class RankAdapters:
    """The adapters of rank 0. Reads and loads are passed on to the other ranks before the next plan."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory
        self._messages: deque[AdapterMessage] = deque()

    def read(self, buffer: int, path: str) -> bytes:
        """As `AdapterStore.read`. The digest covers the matrices of all ranks."""
        own = self._memory.read(buffer, path)
        self._messages.append(AdapterMessage(buffer, path))
        return hashlib.blake2b(own + _digest_files(Path(path)), digest_size=len(own)).digest()

    def load(self, slot: int, buffer: int) -> None:
        self._memory.load(slot, buffer)
        self._messages.append(AdapterMessage(buffer, slot=slot))

    def take_messages(self) -> Iterator[bytes]:
        """Those since the last call, in order."""
        while self._messages:
            yield encode_message(self._messages.popleft())


class RankReads:
    """The adapters of another rank."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory
        self._pool = ThreadPoolExecutor(1, "slipstream-adapters")
        self._reads: dict[int, Future[bytes]] = {}  # the last one into each buffer

    def run(self, data: bytes) -> None:
        message = decode_message(data)
        if message.slot < 0:
            self._reads[message.buffer] = self._pool.submit(self._memory.read, message.buffer, message.path)
        else:
            self._wait(message.buffer)
            self._memory.load(message.slot, message.buffer)

    def prepare(self, plan: StepPlan) -> None:
        """Waits until the adapters that the plan loads are read. Raises what reading raised."""
        for load in () if plan.adapters is None else plan.adapters.loads:
            self._wait(load.buffer)

    def _wait(self, buffer: int) -> None:
        if (read := self._reads.pop(buffer, None)) is not None:
            read.result()


def _digest_files(folder: Path) -> bytes:
    """Digest of the files of an adapter: the buffer of a rank has only a part of its matrices."""
    digest = hashlib.blake2b()
    for path in sorted(filter(Path.is_file, folder.glob("adapter_*"))):
        digest.update(path.name.encode())
        with open_regular(path) as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.digest()
