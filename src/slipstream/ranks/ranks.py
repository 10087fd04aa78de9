"""Ranks: all ranks of a model but the first, for the process of rank 0; and Workers, the executor over all ranks.

Rank 0 runs in the core's process, the others in processes of their own (`process.py`), which rank 0 starts on its host,
or which were started on other nodes and connect to it. Either way a rank gets all messages through one socket. Every
plan is written once to each rank and launched by all; only rank 0 returns results. A rank that ends, ends the engine:
the collectives that wait for it are ended, and the error names the rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch.distributed import Store, TCPStore

from slipstream.base.errors import EngineDead, SlipstreamError
from slipstream.base.files import OwnedFolder, open_regular
from slipstream.base.processes import Child, how_it_ended, start_child
from slipstream.config.config import EngineConfig
from slipstream.config.memory import rank_environment, visible_gpus
from slipstream.contracts.codec import decoder, encode
from slipstream.contracts.step import (
    DrawEdits,
    Executor,
    Handle,
    StepInterval,
    StepPlan,
    StepResult,
    TierCopier,
    TierPlan,
)
from slipstream.device.collectives import TIMEOUT, Group, announce_end
from slipstream.handoff.mover import Fetch
from slipstream.ranks.link import (
    ADAPTER,
    END,
    FETCH,
    FINISH,
    FREE,
    LATE,
    PLAN,
    SECRET_BYTES,
    START,
    STARTED,
    TIER,
    RankLink,
    RankSocket,
    RankStart,
    RankWatch,
    accept_ranks,
    ended_within,
    wait_for_step,
)

_CONNECT_SECONDS = 120.0  # for a rank of another node to connect, before it loads its part
_EXIT_SECONDS = 5.0

T = TypeVar("T")


class Ranks:
    """A thread waits for the end of any of them, whether or not a step runs: NCCL would wait for that rank for ever."""

    def __init__(self, config: EngineConfig, socks: Sequence[socket.socket], store: Path | Store, address: str) -> None:
        """Sends each rank its part of the configuration, which it loads meanwhile. `socks`: connected with rank 1, 2
        and so on. `store`: where they find each other. `address`: of rank 0."""
        self.num_ranks = 1 + len(socks)
        self.links = [RankSocket(sock) for sock in socks]
        self.group: Group | None = None  # set by `join`
        self.death: str | None = None  # the first rank that ended, and how
        self.children: Sequence[Child] = ()  # the processes of the ranks, if they were started here
        self.folder: OwnedFolder | None = None  # of the store, if it is a file
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._store: Path | Store | None = store
        self._address = address
        self._watch: RankWatch | None = None
        self._joining: Future[Group] = Future()
        self._woken, self._wakes = os.pipe()
        where = str(store) if isinstance(store, Path) else store.port if isinstance(store, TCPStore) else ""
        for rank in range(1, self.num_ranks):
            with contextlib.suppress(OSError):  # `wait_until_loaded` reports that it has ended
                self.links[rank - 1].send(START, encode(RankStart(config.of_rank(rank), address, where, self.secret)))

    @property
    def file(self) -> int:
        """A file descriptor that becomes readable when a rank has ended."""
        return self._woken

    def write(self, kind: bytes, data: bytes = b"") -> None:
        """Sends a message to all of them. Raises EngineDead if one has ended."""
        for rank, link in enumerate(self.links, 1):
            try:
                link.send(kind, data)
            except OSError:
                raise EngineDead(f"rank {rank} has ended") from None

    def join(self, device: torch.device) -> Group:
        """Waits until all ranks have loaded, and joins them."""
        self.wait_until_loaded()
        self._watch = RankWatch(self._files, self._find_death)
        threading.Thread(target=self._open_group, args=(device,), name="slipstream-join", daemon=True).start()
        self.group = self._joining.result()
        if self.death is not None:
            self.group.abort()  # the thread of the watch came before this group
        return self.group

    def wait_until_loaded(self) -> None:
        """Raises EngineDead if a rank did not start."""
        for rank, link in enumerate(self.links, 1):
            if link.receive() is None:
                raise EngineDead(f"rank {rank} did not start: {self.how_it_ended(rank)}; see its last lines in the log")

    def open_group(self, device: torch.device) -> Group:
        assert self._store is not None, "the ranks have started"
        return Group(0, self.num_ranks, self._store, self._address, device)

    def started(self) -> list[tuple[str, int]]:
        """Waits until no rank needs the store any longer. Returns where each serves its parts of pages."""
        assert self.group is not None, "the ranks have not joined"
        decode = decoder(tuple[str, int]).decode
        addresses = [decode(self.group.receive(STARTED.format(rank))) for rank in range(1, self.num_ranks)]
        if not self.group.is_nccl:  # which may read it at any time
            self._remove_store()  # now, since nothing removes a file where all ranks are killed
        return addresses

    def dead_rank(self, seconds: float = 0.0) -> str | None:
        """Describes a rank that has ended; `seconds`: time to wait for one."""
        if not (ended := ended_within(self._files, seconds)):
            return None
        return f"rank {ended[0] + 1} has ended: {self.how_it_ended(ended[0] + 1)}"

    def how_it_ended(self, rank: int) -> str:
        """Of a rank whose connection has ended."""
        if not self.children:
            return "its node or its process was lost"
        child = self.children[rank - 1]
        child.wait(_EXIT_SECONDS)
        return how_it_ended(child.process.returncode) or "it exited"

    def check(self) -> None:
        """Raises EngineDead if a rank has ended."""
        if self.death is not None:
            raise EngineDead(self.death)

    def explained(self, call: Callable[[], T]) -> T:
        """Calls, and names a rank that has ended where the call fails: a collective only reports a lost connection.
        Results that a rank did not take part in are never returned."""
        try:
            result = call()
        except Exception as error:
            is_explained = isinstance(error, SlipstreamError) and not isinstance(error, EngineDead)
            if not is_explained and (found := self.dead_rank(1.0)) is not None:
                raise EngineDead(self.death or found) from error  # the watch ends the other ranks
            raise
        self.check()
        return result

    def close(self) -> None:
        """The ranks end by themselves, or are killed after some seconds."""
        self._stop_watching()
        with contextlib.suppress(EngineDead):
            self.write(END)
        deadline = time.monotonic() + _EXIT_SECONDS
        left = list(self._files)  # they may still read this one's memory
        while left and (ended := ended_within(left, max(0.0, deadline - time.monotonic()))):
            left = [file for index, file in enumerate(left) if index not in ended]
        for child in self.children:
            child.wait(_EXIT_SECONDS if not left else 0.0)
        if self.group is not None:
            self.group.abort()
        for link in self.links:
            link.sock.close()
        self._remove_store()
        os.close(self._woken)
        os.close(self._wakes)

    def kill(self) -> None:
        """Ends them at once, after a failure."""
        self._stop_watching()
        self._kill_all()
        self.close()

    @property
    def _files(self) -> list[int]:
        return [link.sock.fileno() for link in self.links]

    def _kill_all(self) -> None:
        for child in self.children:
            child.process.kill()
        for link in self.links:
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)  # a rank exits when its connection ends

    def _open_group(self, device: torch.device) -> None:
        """In a thread: a library that connects to a rank that has just ended waits for it for minutes."""
        try:
            result = self.open_group(device)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # a rank has ended
                self._joining.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self._joining.set_result(result)

    def _find_death(self) -> None:
        """In the thread of the watch. Ends the other ranks, and what they and this one wait for."""
        self.death = self.dead_rank(1.0) or "a rank has ended"
        with contextlib.suppress(InvalidStateError):  # all have joined
            self._joining.set_exception(EngineDead(self.death))
        if (store := self._store) is not None:
            announce_end(store, self.num_ranks, self.death)
        self._kill_all()
        if self.group is not None:
            self.group.abort()
        os.write(self._wakes, b"e")

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _remove_store(self) -> None:
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = self._store = None


def start_ranks(config: EngineConfig) -> Ranks:
    """As processes of this host."""
    folder = OwnedFolder("ranks")
    gpus = visible_gpus() if config.device.kind == "cuda" else []
    pairs, children = [socket.socketpair() for _ in range(1, config.model.num_ranks)], []
    for rank, (_, theirs) in enumerate(pairs, 1):
        with theirs:
            file, environment = theirs.fileno(), rank_environment(rank, gpus) if gpus else {}
            child = start_child(f"rank {rank}", "slipstream.ranks.process", [file], [file], environment=environment)
        children.append(child)
    ranks = Ranks(config, [ours for ours, _ in pairs], folder.path / "store", "127.0.0.1")
    ranks.children, ranks.folder = children, folder
    return ranks


def accepted_ranks(config: EngineConfig, link: RankLink) -> Ranks:
    """Those that were started on other nodes. Waits until all have connected."""
    with socket.socket(fileno=link.listener) as listener:
        address = str(listener.getsockname()[0])
        found = accept_ranks(listener, link.secret, range(1, config.model.num_ranks), _CONNECT_SECONDS)
    store = TCPStore(address, 0, None, True, TIMEOUT, wait_for_workers=False)
    return Ranks(config, [found[rank] for rank in sorted(found)], store, address)


class Workers:
    """Rank 0 and the processes of the others."""

    def __init__(
        self,
        runner: Executor,
        ranks: Ranks,
        adapters: RankAdapters | None = None,
        tier: TierCopier | None = None,
    ) -> None:
        """`adapters`, `tier`: of rank 0; None: the engine has none."""
        self.runner = runner
        self.adapters = adapters
        self._tier = tier
        self._ranks = ranks
        self._last: Handle | None = None  # the newest step
        self._is_closed = False

    def launch(self, plan: StepPlan) -> None:
        def launch() -> None:
            for message in () if self.adapters is None else self.adapters.take_messages():
                self._ranks.write(ADAPTER, message)
            self._ranks.write(PLAN, encode(plan))
            self.runner.launch(plan)

        self._ranks.explained(launch)

    def finish(self, late: DrawEdits | None = None) -> Handle:
        def finish() -> Handle:
            self._ranks.write(*((FINISH, b"") if late is None else (LATE, encode_draw_edits(late))))
            return self.runner.finish(late)

        self._last = handle = WorkerHandle(self._ranks.explained(finish), self._ranks)
        return handle

    def free_queries(self, queries: tuple[int, ...]) -> None:
        self._ranks.write(FREE, encode(queries))
        self.runner.free_queries(queries)

    def copy(self, plan: TierPlan) -> None:
        """As `TierCopier`: every rank copies its part of the pages."""
        assert self._tier is not None, "the cache has no second tier"
        self._ranks.write(TIER, encode(plan))
        self._tier.copy(plan)

    # For the loop of the core, which may have nothing to launch

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when `is_waited_for` may have become true."""
        return [self._ranks.file]

    def is_waited_for(self) -> bool:
        """Whether `follow` would raise an error."""
        return self._ranks.death is not None

    def follow(self) -> None:
        """Raises EngineDead if a rank has ended."""
        self._ranks.check()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            wait_for_step(self._last)
            self._ranks.close()
            self.runner.close()


class WorkerHandle:
    """A step of rank 0, whose failure is explained by a rank that has ended."""

    def __init__(self, handle: Handle, ranks: Ranks) -> None:
        self._handle = handle
        self._ranks = ranks

    @property
    def has_no_result(self) -> bool:
        return self._handle.has_no_result

    @property
    def interval(self) -> StepInterval | None:
        return self._handle.interval

    def wait(self) -> StepResult:
        return self._ranks.explained(self._handle.wait)

    def done(self) -> bool:
        return self._ranks.explained(self._handle.done)

    def wait_until_ended(self) -> None:
        self._ranks.explained(self._handle.wait_until_ended)


class RankMover:
    """The PageMover of another rank, which fetches its parts of pages when rank 0 does."""

    def __init__(self, link: RankSocket, address: tuple[str, int]) -> None:
        """`address`: where the rank serves its parts."""
        self.address = address
        self._link = link
        self._calls: dict[int, Future[list[bool] | None]] = {}
        self._num_calls = 0
        self._has_ended = False
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, name="slipstream-fetched", daemon=True).start()

    def start(self, fetch: Fetch) -> Callable[[], list[bool]]:
        """The rank fetches after the copies of all plans that were sent before. The result waits for it."""
        call: Future[list[bool] | None] = Future()
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._calls[number] = call
            if self._has_ended:
                call.set_result(None)
        with contextlib.suppress(OSError):  # it has ended, and so will the engine
            self._link.send(FETCH, encode((number, fetch)))
        return lambda: call.result() or [False] * len(fetch.pages)

    def _receive(self) -> None:
        decode = decoder(tuple[int, list[bool]]).decode
        while (message := self._link.receive()) is not None:
            number, arrived = decode(message[1])
            self._calls.pop(number).set_result(arrived)
        with self._lock:
            self._has_ended = True
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.set_result(None)


# LoRA adapters of a model that several ranks share: every rank reads its part of an adapter from the same folder.
#
# Rank 0 reads first, in the thread that reads adapters, so an adapter that cannot be used is refused before other ranks
# read it. The other ranks get messages in order with the plans: each reads in a thread of its own, and a plan that
# copies the adapter to the device waits for that.


class AdapterMemory(Protocol):
    """The part of `AdapterStore` that is used here."""

    def read(self, buffer: int, path: str) -> bytes: ...
    def load(self, slot: int, buffer: int) -> None: ...


class AdapterMessage(msgspec.Struct, array_like=True):
    buffer: int
    path: str = ""  # read this folder into the buffer
    slot: int = -1  # or copy the buffer to this slot


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
            yield encode(self._messages.popleft())


def encode_draw_edits(late: DrawEdits) -> bytes:
    """Without the code of logits processors, which runs on rank 0 only, and without what makes masks again."""
    without: dict[str, Any] = {"run": None, "fail": None}
    edits = tuple(replace(edit, **without) for edit in late.edits)
    return encode(replace(late, edits=edits, sources=None, lengths=None))


def _digest_files(folder: Path) -> bytes:
    """Digest of the files of an adapter: the buffer of a rank has only a part of its matrices."""
    digest = hashlib.blake2b()
    for path in sorted(filter(Path.is_file, folder.glob("adapter_*"))):
        digest.update(path.name.encode())
        with open_regular(path) as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.digest()
