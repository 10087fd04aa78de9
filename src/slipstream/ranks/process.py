"""One rank of a model: `python -m slipstream.ranks.process SOCKET`, with a socket that is connected with rank 0.

The process runs the plans of rank 0, in their order, until these say so or rank 0 has ended. It returns no results.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed import Store, TCPStore

from slipstream.base.processes import enter_child
from slipstream.contracts.codec import decoder, encode
from slipstream.contracts.step import DrawEdits, Executor, Handle, StepPlan, TierCopier, TierPlan
from slipstream.device.collectives import TIMEOUT, Group
from slipstream.handoff.mover import Copies, Fetch, PageMover, wait_until
from slipstream.ranks.link import (
    ADAPTER,
    END,
    FETCH,
    FETCHED,
    FINISH,
    FREE,
    LATE,
    PLAN,
    READY,
    START,
    STARTED,
    TIER,
    RankSocket,
    RankStart,
)
from slipstream.ranks.ranks import AdapterMemory, AdapterMessage
from slipstream.runner.build import build_runner
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.page_tier import PageTier
from slipstream.runner.runner import ModelRunner


def main(argv: list[str]) -> int:
    enter_child()
    run_rank(RankSocket(socket.socket(fileno=int(argv[0]))))
    return 0


def run_rank(link: RankSocket) -> ModelRunner | None:
    """Builds the runner of a rank, runs all plans, and returns it; None: rank 0 has ended before."""
    if (message := link.receive()) is None:
        return None
    assert message[0] == START
    start: RankStart = decoder(RankStart).decode(message[1])
    config, joined = start.config, list[Group]()
    is_local = link.sock.family == socket.AF_UNIX
    address = start.address if is_local else str(link.sock.getsockname()[0])
    store: Path | Store = Path(str(start.store))
    if isinstance(start.store, int):
        store = TCPStore(start.address, start.store, None, False, TIMEOUT, wait_for_workers=False)

    def join(device: torch.device) -> Group:
        link.send(READY)
        joined.append(Group(config.model.rank, config.model.num_ranks, store, address, device))
        return joined[0]

    runner, _ = build_runner(config, join=join)
    mover, tier = None, runner.find(PageTier)
    if config.transfer is not None and tier is not None:
        node = "" if address == start.address else address
        mover = PageMover(config.transfer, tier, start.secret, config.model.rank, node)
    joined[0].send(STARTED.format(config.model.rank), encode(("", 0) if mover is None else mover.address))
    run_plans(runner, link, config.scheduler.depth, runner.find(AdapterStore), tier, mover)
    if mover is not None:
        mover.close()
    return runner


def run_plans(
    runner: Executor,
    link: RankSocket,
    depth: int,
    memory: AdapterMemory | None = None,
    tier: TierCopier | None = None,
    mover: PageMover | None = None,
) -> None:
    """Runs plans until they end. At most `depth` steps are ahead of the oldest that has not ended. `mover`: if pages
    are exchanged with other engines."""
    in_flight: deque[Handle] = deque()
    fetches = None if mover is None else RankFetches(mover, link)
    adapters = None if memory is None else RankReads(memory)
    decode_plan = decoder(StepPlan).decode
    while (message := link.receive()) is not None:
        kind, data = message
        if kind == PLAN:
            plan: StepPlan = decode_plan(data)
            if adapters is not None:
                adapters.prepare(plan)
            runner.launch(plan)
        elif kind in (FINISH, LATE):
            in_flight.append(runner.finish(decoder(DrawEdits).decode(data) if kind == LATE else None))
            while len(in_flight) > depth:
                in_flight.popleft().wait_until_ended()
        elif kind == FREE:
            runner.free_queries(decoder(tuple[int, ...]).decode(data))
        elif kind == ADAPTER:
            assert adapters is not None, "the engine has no adapters"
            adapters.run(decoder(AdapterMessage).decode(data))
        elif kind == TIER:
            assert tier is not None, "the cache has no second tier"
            tier.copy(decoder(TierPlan).decode(data))
        elif kind == FETCH:
            assert fetches is not None, "no pages are exchanged"
            fetches.start(*decoder(tuple[int, Fetch]).decode(data))
        elif kind == END:
            for handle in in_flight:  # other ranks may still read this one's memory
                handle.wait_until_ended()
            return


class RankReads:
    """The adapters of another rank."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory
        self._pool = ThreadPoolExecutor(1, "slipstream-adapters")
        self._reads: dict[int, Future[bytes]] = {}  # the last one into each buffer

    def run(self, message: AdapterMessage) -> None:
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


class RankFetches:
    """The pages that another rank fetches for rank 0, which waits for the answers."""

    def __init__(self, mover: PageMover, link: RankSocket) -> None:
        self._mover = mover
        self._link = link

    def start(self, number: int, fetch: Fetch) -> None:
        """Fetches into slots once all copies that were planned so far are done."""
        given = number, fetch, self._mover.memory.mark(), time.monotonic() + fetch.timeout
        threading.Thread(target=self._run, args=given, name="slipstream-fetch", daemon=True).start()

    def _run(self, number: int, fetch: Fetch, copies: Copies, deadline: float) -> None:
        arrived = [False] * len(fetch.pages)
        try:
            if wait_until(copies.done, deadline):
                arrived = self._mover.fetch(fetch, deadline)
        finally:
            with contextlib.suppress(OSError):  # rank 0 has ended
                self._link.send(FETCHED, encode((number, arrived)))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads of the device
