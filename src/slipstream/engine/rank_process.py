"""One rank of a model, in two ways:

* `python -m slipstream.engine.rank_process MEMORY MESSAGES ACKNOWLEDGEMENTS STORE` on the node of rank 0, with the
  EngineConfig as msgpack in standard input;
* `python -m slipstream.engine.rank_process SOCKET` on any node, with a connected socket over which a RankStart comes.

The process runs the plans of rank 0, in their order, until these say so or rank 0 has ended. It returns no results.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch.distributed import Store, TCPStore

from slipstream.base.log import set_up_child_log
from slipstream.base.processes import die_with_parent
from slipstream.config.config import EngineConfig
from slipstream.contracts.step import Handle, TierCopier
from slipstream.device.collectives import TIMEOUT, Group
from slipstream.dist.plan_codec import decode_late, decode_plan, decode_tier
from slipstream.dist.plan_ring import PlanReader
from slipstream.dist.plan_socket import PlanSocketReader
from slipstream.engine.rank_adapters import AdapterMemory, RankReads
from slipstream.engine.rank_link import RankStart, receive_exactly
from slipstream.engine.rank_pages import ShardPages
from slipstream.engine.ranks import ADAPTER, END, FINISH, FREE, LATE, MARK, PLAN, STARTED, TIER
from slipstream.engine.workers import LocalRunner
from slipstream.runner.build import build_runner
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
    pages = None
    if config.transfer is not None and runner.tier is not None:
        pages = ShardPages(config, joined[0], runner.tier)
    joined[0].send(STARTED.format(config.model.rank), b"")
    run_plans(runner, plans, config.scheduler.depth, runner.adapters, runner.tier, pages)
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
            in_flight.append(runner.finish(decode_late(data) if kind == LATE else None))
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


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads of the device
