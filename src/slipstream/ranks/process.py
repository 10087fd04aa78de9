"""One rank of a model, in two ways:

* `python -m slipstream.ranks.process MEMORY MESSAGES ACKNOWLEDGEMENTS STORE` on the node of rank 0, with the
  EngineConfig as msgpack in standard input;
* `python -m slipstream.ranks.process SOCKET` on any node, with a connected socket over which a RankStart comes.

The process runs the plans of rank 0, in their order, until these say so or rank 0 has ended. It returns no results.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch.distributed import Store, TCPStore

from slipstream.base.files import open_regular
from slipstream.base.log import set_up_child_log
from slipstream.base.processes import die_with_parent
from slipstream.config.config import EngineConfig
from slipstream.contracts.step import DrawEdits, Handle, StepInterval, StepPlan, StepResult, TierCopier, TierPlan
from slipstream.device.collectives import TIMEOUT, Group
from slipstream.ranks.link import RankStart, receive_exactly, wait_for_step
from slipstream.ranks.plan_ring import (
    PlanReader,
    PlanSocketReader,
    decode_draw_edits,
    decode_plan,
    decode_tier,
    encode_draw_edits,
    encode_plan,
    encode_tier,
)
from slipstream.ranks.rank_pages import RankPages, ShardPages
from slipstream.ranks.ranks import ADAPTER, END, FINISH, FREE, LATE, MARK, PLAN, STARTED, TIER, Ranks
from slipstream.runner.build import build_runner
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.page_tier import PageTier
from slipstream.runner.runner import ModelRunner


def main(argv: list[str]) -> int:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when this one exits
    set_up_child_log()
    faulthandler.enable()
    return _run_remote(int(argv[0])) if len(argv) == 1 else _run_local(argv)


def _run_local(argv: list[str]) -> int:
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    run_rank(config, PlanReader(*map(int, argv[:3])), Path(argv[3]))
    return 0


def _run_remote(descriptor: int) -> int:
    sock = socket.socket(fileno=descriptor)
    header = receive_exactly(sock, 8)
    data = None if header is None else receive_exactly(sock, int.from_bytes(header, "little"))
    if data is None:
        return 0  # rank 0 has ended
    start = msgspec.msgpack.decode(data, type=RankStart)
    store = TCPStore(start.store_address, start.store_port, None, False, TIMEOUT, wait_for_workers=False)
    run_rank(start.config, PlanSocketReader(sock, receive_exactly), store, str(sock.getsockname()[0]))
    return 0


def run_rank(config: EngineConfig, plans: PlanSource, store: Path | Store, address: str = "127.0.0.1") -> ModelRunner:
    """Builds the runner of a rank, runs all plans, and returns it. `store`, `address`: as for Group."""

    joined: list[Group] = []

    def join(device: torch.device) -> Group:
        plans.ready()
        joined.append(Group(config.model.rank, config.model.num_ranks, store, address, device))
        return joined[0]

    runner, _ = build_runner(config, join=join)
    pages, tier = None, runner.find(PageTier)
    if config.transfer is not None and tier is not None:
        pages = ShardPages(config, joined[0], tier)
    joined[0].send(STARTED.format(config.model.rank), b"")
    run_plans(runner, plans, config.scheduler.depth, runner.find(AdapterStore), tier, pages)
    return runner


class PlanSource(Protocol):
    def ready(self) -> None:
        """Notifies rank 0 that this rank has loaded its part."""

    def read(self) -> tuple[bytes, bytes] | None:
        """The kind and the data of the next message; None: the writer has ended."""


def run_plans(
    runner: LocalRunner,
    plans: PlanSource,
    depth: int,
    memory: AdapterMemory | None = None,
    tier: TierCopier | None = None,
    pages: ShardPages | None = None,
) -> None:
    """Runs plans until they end. At most `depth` steps are ahead of the oldest that has not ended. `pages`: what this
    rank exchanges with other engines."""
    in_flight: deque[Handle] = deque()
    adapters = None if memory is None else RankReads(memory)
    while (message := plans.read()) is not None:
        kind, data = message
        if kind == PLAN:
            plan = decode_plan(data)
            if adapters is not None:
                adapters.prepare(plan)
            runner.launch(plan)
        elif kind in (FINISH, LATE):
            in_flight.append(runner.finish(decode_draw_edits(data) if kind == LATE else None))
            while len(in_flight) > depth:
                in_flight.popleft().wait_until_ended()
        elif kind == FREE:
            runner.free_queries(msgspec.msgpack.decode(data, type=tuple[int, ...]))
        elif kind == ADAPTER:
            assert adapters is not None, "the engine has no adapters"
            adapters.run(data)
        elif kind == TIER:
            assert tier is not None, "the cache has no second tier"
            tier.copy(decode_tier(data))
        elif kind == MARK:
            assert pages is not None, "no pages are exchanged"
            pages.mark()
        elif kind == END:
            for handle in in_flight:  # other ranks may still read this one's memory
                handle.wait_until_ended()
            return


# Workers: the Executor of a model that several ranks share.
#
# Rank 0 runs in the core's process, the others in processes of their own (`process.py`), which are started here
# or on other nodes (`start.py`). Every plan is written once and launched by all ranks; only
# rank 0 returns results. A rank that ends, ends the engine: the collectives that wait for it are ended, and the error
# names the rank.


class LocalRunner(Protocol):
    """The part of ModelRunner that an executor uses."""

    def launch(self, plan: StepPlan) -> None: ...
    def finish(self, late: DrawEdits | None = None) -> Handle: ...
    def free_queries(self, queries: tuple[int, ...]) -> None: ...
    def close(self) -> None: ...


class Workers:
    """Rank 0 and the processes of the others."""

    def __init__(
        self,
        runner: LocalRunner,
        ranks: Ranks,
        adapters: RankAdapters | None = None,
        tier: TierCopier | None = None,
    ) -> None:
        """`adapters`, `tier`: of rank 0; None: the engine has none."""
        self.runner = runner
        self.adapters = adapters
        self._tier = tier
        self._ranks = ranks
        self.pages: RankPages | None = None  # set if pages are exchanged with other engines
        self._last: Handle | None = None  # the newest step
        self._is_closed = False

    def launch(self, plan: StepPlan) -> None:
        def launch() -> None:
            for message in () if self.adapters is None else self.adapters.take_messages():
                self._ranks.plans.write(ADAPTER, message)
            self._ranks.plans.write(PLAN, encode_plan(plan))
            self.runner.launch(plan)

        self._ranks.explained(launch)

    def finish(self, late: DrawEdits | None = None) -> Handle:
        def finish() -> Handle:
            self._ranks.plans.write(*((FINISH, b"") if late is None else (LATE, encode_draw_edits(late))))
            return self.runner.finish(late)

        self._last = handle = WorkerHandle(self._ranks.explained(finish), self._ranks)
        return handle

    def free_queries(self, queries: tuple[int, ...]) -> None:
        self._ranks.plans.write(FREE, msgspec.msgpack.encode(queries))
        self.runner.free_queries(queries)

    def copy(self, plan: TierPlan) -> None:
        """As `TierCopier`: every rank copies its part of the pages."""
        assert self._tier is not None, "the cache has no second tier"
        self._ranks.plans.write(TIER, encode_tier(plan))
        self._tier.copy(plan)

    def write_mark(self) -> None:
        """Tells the other ranks that slots of the second tier are reserved after the plans so far."""
        self._ranks.plans.write(MARK)

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


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads of the device
