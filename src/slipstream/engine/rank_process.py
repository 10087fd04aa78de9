"""One rank of a model: `python -m slipstream.engine.rank_process MEMORY MESSAGES ACKNOWLEDGEMENTS STORE`.

Standard input has the EngineConfig as msgpack. The process runs the plans of the ring, in their order, until the ring
says so or rank 0 has ended. It returns no results.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections import deque
from pathlib import Path

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.dist.group import Group
from slipstream.dist.plan_codec import decode_late, decode_plan
from slipstream.dist.plan_ring import PlanReader
from slipstream.engine.child_process import die_with_parent
from slipstream.engine.executor import Handle
from slipstream.engine.workers import END, FINISH, FREE, LATE, PLAN, LocalRunner
from slipstream.log import set_up_child_log
from slipstream.nn.layers.connect_ranks import connect_ranks
from slipstream.runner.assemble import build_runner


def main(argv: list[str]) -> int:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when this one exits
    set_up_child_log()
    faulthandler.enable()
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    ring = PlanReader(*map(int, argv[:3]))
    runner, _ = build_runner(config)
    ring.ready()
    connect_ranks(runner.model, Group(config.model.rank, config.model.num_ranks, Path(argv[3])))
    run_plans(runner, ring, config.scheduler.depth)
    return 0


def run_plans(runner: LocalRunner, ring: PlanReader, depth: int) -> None:
    """Runs plans until the ring ends. At most `depth` steps are ahead of the oldest that has not ended."""
    in_flight: deque[Handle] = deque()
    while (message := ring.read()) is not None:
        kind, data = message
        if kind == PLAN:
            runner.launch(decode_plan(data))
        elif kind in (FINISH, LATE):
            in_flight.append(runner.finish(decode_late(data) if kind == LATE else None))
            while len(in_flight) > depth:
                in_flight.popleft().wait_until_ended()
        elif kind == FREE:
            runner.free_queries(msgspec.msgpack.decode(data, type=tuple[int, ...]))
        elif kind == END:
            return


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads of the device
