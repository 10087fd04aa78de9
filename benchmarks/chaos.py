"""Chaos run: requests over replicas whose processes are killed at random; every request must end exactly once.

A replica is a core process, with `--ranks` above 1 also the processes of its other ranks, and any of them is killed
with SIGKILL. With `--share-experts` the replicas share experts, so all of them end together. Counted: requests by how
they ended, endings per request, processes that are left. Measured: seconds from a kill until the front end has ended
or moved every request of that replica.

    python benchmarks/chaos.py --model TINY --requests 5000 --kills 10
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import signal
import time
from pathlib import Path

from slipstream import SamplingParams
from slipstream.base.errors import ReplicaLost
from slipstream.base.processes import Backoff
from slipstream.config.options import make_options
from slipstream.contracts.messages import Output
from slipstream.front.async_engine import AsyncEngine
from slipstream.transport.client import Listener
from slipstream.transport.frames import FromCore, Refused
from slipstream.transport.replica_start import ReplicaProcesses
from slipstream.transport.replicas import Replica, ReplicaClient


class Endings:
    """Counts the last messages of each request on their way to the router."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.counts: collections.Counter[str] = collections.Counter()

    def receive(self, messages: list[FromCore]) -> None:
        for message in messages:
            if isinstance(message, Refused) or (isinstance(message, Output) and message.finish_reason is not None):
                self.counts[message.request_id] += 1
        self.listener.receive(messages)

    def fail(self, error: BaseException) -> None:
        self.listener.fail(error)


class Chaos(ReplicaClient):
    """Measures how long after a kill its requests are ended or moved."""

    def __init__(self, source: ReplicaProcesses, count: int) -> None:
        super().__init__(source, count, lambda: Backoff(limit=10**6, longest=1.0))
        self.killed: dict[int, float] = {}  # by replica: when one of its processes was killed
        self.seconds: list[float] = []

    def listen(self, listener: Listener) -> None:
        if self._listener is None:
            self.endings = Endings(listener)
        super().listen(self.endings)

    def lose(self, replica: Replica, error: BaseException) -> None:
        super().lose(replica, error)
        if replica.index in self.killed:
            self.seconds.append(time.monotonic() - self.killed.pop(replica.index))

    def kill_one(self, draw: random.Random, *, only_ranks: bool = False) -> str | None:
        """Kills a process of a replica that has requests. `only_ranks`: not its core."""
        ready = [each for each in self.replicas if each.is_ready and each.requests and each.pid is not None]
        if not ready:
            return None
        replica = draw.choice(ready)
        assert replica.pid is not None
        processes = children(replica.pid) if only_ranks else [replica.pid, *children(replica.pid)]
        victim = draw.choice(processes)
        self.killed.setdefault(replica.index, time.monotonic())
        os.kill(victim, signal.SIGKILL)
        return f"{'rank' if victim != replica.pid else 'core'} of replica {replica.index}"


def children(pid: int) -> list[int]:
    try:
        return [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


async def run(args: argparse.Namespace) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Returns how many requests ended how, and how many processes of which kind were killed."""
    others = children(os.getpid())  # started by the caller
    options = make_options(
        model=args.model,
        data_parallel_size=args.replicas,
        tensor_parallel_size=args.ranks,
        enable_expert_parallel=args.share_experts,
        device="cpu",
        num_threads=1,
        max_model_len=64,
        num_pages=256,
        page_size=4,
        max_num_seqs=32,
    )
    source = ReplicaProcesses([options])
    client = Chaos(source, source.count)
    engine = AsyncEngine(client=client)
    await engine.until_ready()
    draw, ends, begun = random.Random(args.seed), collections.Counter[str](), time.monotonic()
    room = asyncio.Semaphore(args.in_flight)
    slowest = 0.0

    async def one(number: int) -> None:
        nonlocal slowest
        prompt = [draw.randrange(1, 60) for _ in range(draw.randrange(1, 20))]
        params = SamplingParams(max_tokens=draw.randrange(1, args.max_tokens), ignore_eos=True, seed=number)
        async with room:
            start = time.monotonic()
            try:
                async for result in engine.generate(prompt, params, request_id=str(number)):
                    final = result
                ends["answered" if final.finished else "cut off"] += 1
            except ReplicaLost:
                ends["lost"] += 1
            slowest = max(slowest, time.monotonic() - start)
            done.release()

    done = asyncio.Semaphore(0)  # counts ended requests
    tasks = [asyncio.ensure_future(one(number)) for number in range(args.requests)]
    kills = collections.Counter[str]()
    for _ in range(args.kills):
        for _ in range(args.requests // (args.kills + 1)):
            await done.acquire()
        if (what := client.kill_one(draw, only_ranks=args.only_ranks)) is not None:
            kills[what.split(" of ")[0]] += 1
    await asyncio.gather(*tasks)
    twice = {name: count for name, count in client.endings.counts.items() if count != 1}
    print(f"{args.requests} requests in {time.monotonic() - begun:.0f} s: {dict(ends)}; killed: {dict(kills)}")
    print(f"endings that are not exactly one: {twice}; requests without an ending: {args.requests - ends.total()}")
    restarts = sum(replica.num_restarts for replica in client.replicas)
    if client.seconds:
        print(
            f"from a kill until all requests of the replica were ended or moved: {max(client.seconds):.2f} s at most "
            f"of {len(client.seconds)}; slowest request {slowest:.1f} s, with the wait for {restarts} restarts"
        )
    await engine.close()
    own = [pid for pid in children(os.getpid()) if pid not in others]
    left = [pid for pid in own if Path(f"/proc/{pid}/cmdline").read_bytes()]
    print(f"processes left: {len(left)}")
    assert not twice and ends.total() == args.requests and not left
    return ends, kills


def read_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder; take a tiny model")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size of each replica")
    parser.add_argument("--share-experts", action="store_true", help="enable_expert_parallel")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--only-ranks", action="store_true", help="kill no cores, only their other ranks")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(run(read_args()))
