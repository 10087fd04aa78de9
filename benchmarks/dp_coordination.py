"""Coordination of engines that share experts: the exchange of step sizes one step ahead, beside a CPU all-reduce in
every step that the host waits for.

Every engine is a process with a simulated host (planning takes a random time) and a simulated device (a thread: a step
begins when all engines have launched it, and takes a fixed time). Reported for each way: steps per second, the time
that the host stands still for the exchange, and the time that the device is idle.

    python benchmarks/dp_coordination.py --engines 2 --steps 300 --device-ms 10 --host-ms 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from slipstream.contracts.step import StepPlan, StepSizes
from slipstream.device.collectives import Group
from slipstream.device.streams import ThreadedStream
from slipstream.ranks.lockstep import LockstepExecutor, connect_peers, listen_for_peers, padding_plan

DEPTH = 1


class SimulatedRunner:
    """A device whose steps begin when all engines have launched them."""

    def __init__(self, group: Group, seconds: float) -> None:
        self.stream = ThreadedStream("device")
        self.group, self.seconds = group, seconds
        self.busy = 0.0

    def sizes_of(self, plan: StepPlan) -> StepSizes:
        return StepSizes(8, 8, is_single=True, only_last=False, can_replay=True)

    def launch(self, plan: StepPlan) -> None:
        self.stream.run(self._step)

    def finish(self, late: Any = None) -> _Handle:
        event = self.stream.record()
        self.stream.flush()
        return _Handle(event)

    def free_queries(self, queries: tuple[int, ...]) -> None: ...

    def close(self) -> None:
        self.stream.close()

    def _step(self) -> None:
        self.group.all_reduce(torch.zeros(1))
        begin = time.perf_counter()
        time.sleep(self.seconds)
        self.busy += time.perf_counter() - begin


class _Handle:
    has_no_result = False
    interval = None

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.done())

    def wait(self) -> Any:
        self.event.wait()

    def wait_until_ended(self) -> None:
        self.event.wait()


class AllReduce:
    """The other way: the host sums the sizes of all engines in every step before it launches."""

    def __init__(self, runner: SimulatedRunner, group: Group) -> None:
        self.runner, self.group, self.waited = runner, group, 0.0

    def launch(self, plan: StepPlan) -> None:
        sizes = torch.zeros(4, self.group.size, dtype=torch.int32)
        sizes[:, self.group.rank] = 8
        begin = time.perf_counter()
        self.group.all_reduce(sizes)
        self.waited += time.perf_counter() - begin
        self.runner.launch(plan)

    def finish(self) -> _Handle:
        return self.runner.finish()


class Timed(LockstepExecutor):
    waited = 0.0

    def launch(self, plan: StepPlan) -> None:
        before, begin = self.exchange.num_waits, time.perf_counter()
        super().launch(plan)
        if self.exchange.num_waits > before:
            self.waited += time.perf_counter() - begin


def engine(rank: int, args: argparse.Namespace, way: str, folder: str, results: Any) -> None:
    path = Path(folder)
    listener = listen_for_peers(rank, path)
    groups = [Group(rank, args.engines, path / name) for name in ("device", "host")]
    runner = SimulatedRunner(groups[0], args.device_ms / 1000)
    executor: Any
    if way == "exchange":
        executor = Timed(runner, connect_peers(rank, args.engines, listener, path), 1)
    else:
        executor = AllReduce(runner, groups[1])
    plan, in_flight, draw = padding_plan(1), deque[Any](), random.Random(rank)
    begin = time.perf_counter()
    for _ in range(args.steps):
        time.sleep(draw.expovariate(1000 / args.host_ms))  # the host plans
        executor.launch(plan)
        in_flight.append(executor.finish())
        if len(in_flight) > DEPTH:
            in_flight.popleft().wait()
    while in_flight:
        in_flight.popleft().wait()
    seconds = time.perf_counter() - begin
    results.put((seconds, executor.waited, runner.busy))


def measure(args: argparse.Namespace, way: str) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=engine, args=(rank, args, way, folder, results)) for rank in range(args.engines)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
    seconds, waited, busy = (sum(column) / len(found) for column in zip(*found, strict=True))
    per_step = 1e3 / args.steps
    print(
        f"{way:>10}: {args.steps / seconds:7.1f} steps/s; ms per step: host waits for the exchange "
        f"{waited * per_step:6.3f}, device idle {(seconds - busy) * per_step:6.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device-ms", type=float, default=10.0, help="time of a step on the device")
    parser.add_argument("--host-ms", type=float, default=2.0, help="mean time of planning; exponentially distributed")
    parsed = parser.parse_args()
    for each in ("exchange", "all-reduce"):
        measure(parsed, each)
