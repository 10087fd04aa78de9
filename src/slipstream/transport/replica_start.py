"""ReplicaProcesses: starts the core process of each replica, on its own GPU or with its share of the CPU threads."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.base.files import OwnedFolder
from slipstream.base.host import num_cores
from slipstream.base.processes import child_environment, how_it_ended, signals_deferred
from slipstream.config.cache_size import CPU_SHARE
from slipstream.config.memory import ranks_share_gpu, visible_gpus
from slipstream.config.options import Options
from slipstream.ranks.link import RankLink
from slipstream.transport.client import CoreClient
from slipstream.transport.frames import Join, frame
from slipstream.transport.sockets import SocketClient

_EXIT_SECONDS = 10.0  # for a core to exit when its connection is closed
MAX_REPLICAS = 256


class ReplicaProcesses:
    """Processes of this machine, as a ReplicaSource."""

    def __init__(self, options: Sequence[Options], devices: Path = Path("/dev")) -> None:
        """`devices`: the folder of the device files of GPUs."""
        self.count = num_replicas(options)
        check_processors(options)
        self._environments = _environments(options, self.count, devices)
        on_cpu = not self._environments[0]
        threads = max(1, num_cores() // self.count)
        self._options = [of_one_replica(each, self.count, on_cpu=on_cpu, num_threads=threads) for each in options]
        self._handles: dict[int, CoreHandle] = {}
        self._shares_experts = self.count > 1 and any(each.enable_expert_parallel for each in options)
        self._num_starts = [0] * self.count
        # engines that share experts find each other in a folder per generation: all of them end when one ends
        self._folder = OwnedFolder("engines") if self._shares_experts else None

    async def start(self, index: int) -> CoreClient:
        folder = None
        if self._folder is not None:
            generation = self._folder.path / str(self._num_starts[index])
            generation.mkdir(exist_ok=True)
            folder = str(generation)
            self._num_starts[index] += 1
        handle, (sock,) = spawn_core(self._options, environment=self._environments[index], engine=index, folder=folder)
        self._handles[index] = handle
        return await SocketClient.connect(sock)

    async def ended(self, index: int) -> str | None:
        how = await asyncio.to_thread(self._handles[index].wait, _EXIT_SECONDS)
        if self._shares_experts:
            number = self._num_starts[index]
            rest = [
                handle
                for other, handle in self._handles.items()
                if self._num_starts[other] == number and other != index
            ]
            await asyncio.gather(*(asyncio.to_thread(handle.wait, _EXIT_SECONDS) for handle in rest))
        return how

    async def close(self) -> None:
        await asyncio.gather(*(self.ended(index) for index in self._handles))
        if self._folder is not None:
            self._folder.cleanup()


def check_processors(options: Sequence[Options]) -> None:
    for each in options:
        if any(not isinstance(processor, str) for processor in each.logits_processors or ()):
            raise InvalidOption(
                "logits_processors has classes, which cannot be sent to replicas in other processes; give their names "
                "as package.module:Class"
            )


def num_replicas(options: Sequence[Options]) -> int:
    """The number of replicas in the options of the models, which has to be the same for all."""
    counts = {each.data_parallel_size for each in options}
    if len(counts) > 1:
        raise InvalidOption(
            f"models of one engine ask for data_parallel_size {' and '.join(map(str, sorted(counts)))}; a replica runs "
            "all models, so give all the same"
        )
    count = counts.pop()
    if not 1 <= count <= MAX_REPLICAS:
        raise InvalidOption(f"data_parallel_size is {count}; give 1 to {MAX_REPLICAS}")
    return count


def of_one_replica(options: Options, count: int, *, on_cpu: bool, num_threads: int) -> Options:
    """The options of one replica. On the CPU, the default is this number of threads, and the default memory is divided
    by the number of replicas."""
    changes: dict[str, Any] = {} if options.enable_expert_parallel else {"data_parallel_size": 1}
    if on_cpu and options.num_threads is None:
        changes["num_threads"] = num_threads
    if on_cpu and options.gpu_memory_utilization is None:
        changes["gpu_memory_utilization"] = CPU_SHARE / count
    return msgspec.structs.replace(options, **changes)


def _environments(options: Sequence[Options], count: int, devices: Path) -> list[dict[str, str]]:
    """The environment of each replica: it sees its own GPUs only, one for each of its ranks."""
    if all(each.device == "cpu" for each in options):
        return [{} for _ in range(count)]
    gpus = visible_gpus(devices)
    if not gpus and all(each.device == "auto" for each in options):
        return [{} for _ in range(count)]
    num_ranks = max(each.tensor_parallel_size for each in options)
    if gpus and ranks_share_gpu():
        gpus = (gpus * (count * num_ranks))[: count * num_ranks]
    if len(gpus) < count * num_ranks:
        ranks = "" if num_ranks == 1 else f" and tensor_parallel_size {num_ranks}"
        raise InvalidOption(
            f"data_parallel_size is {count}{ranks}, and {len(gpus)} GPUs are visible; each replica needs its own: "
            "lower data_parallel_size, or run on the CPU with device cpu"
        )
    shares = [gpus[first : first + num_ranks] for first in range(0, count * num_ranks, num_ranks)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(share))} for share in shares]


# Starts a core process, from a process that does not load torch.


class CoreStart(msgspec.Struct, frozen=True):
    """The data that a core process reads from its standard input, as JSON."""

    options: list[Options]  # of each model
    engine: int = 0  # number of this engine among those that share experts
    folder: str | None = None  # of these engines, to find each other; None: the engine is alone
    ranks: RankLink | None = None  # where ranks of other nodes connect; None: the core starts all ranks itself


class CoreHandle:
    """A core process, for the process that started it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def how_it_ended(self) -> str | None:
        """Describes an abnormal end; None while the process runs and after a normal exit."""
        code = self.process.poll()
        how = how_it_ended(code)
        if how is None:
            return None
        return f"the engine core {'was' if code is not None and code < 0 else 'ended with'} {how}"

    def wait(self, seconds: float) -> str | None:
        """Waits for the exit, kills the process after `seconds`, and returns what `how_it_ended` does."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"the engine core did not exit within {seconds:g} s and was killed"
        return self.how_it_ended()


def spawn_core(
    options: list[Options],
    num_front_ends: int = 1,
    supervisor: socket.socket | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    engine: int = 0,
    folder: str | None = None,
) -> tuple[CoreHandle, list[socket.socket]]:
    """Starts a core for these models. Returns its handle, and one socket per front end.

    `supervisor`: the core's end of a socket over which more front ends can join (`join_core`). `environment`: variables
    that the core gets besides ours. `engine`, `folder`: as in CoreStart.
    """
    pairs = [socket.socketpair() for _ in range(num_front_ends)]
    start = CoreStart(options, engine, folder)
    return start_core(start, [pair[1] for pair in pairs], supervisor, environment), [pair[0] for pair in pairs]


def start_core(
    start: CoreStart,
    front_ends: Sequence[socket.socket],
    supervisor: socket.socket | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> CoreHandle:
    """Starts a core process over connected sockets, which are closed here."""
    fds = [-1 if supervisor is None else supervisor.fileno(), *(sock.fileno() for sock in front_ends)]
    others = () if start.ranks is None else (start.ranks.listener,)
    with signals_deferred():
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.transport.core_process", *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),  # keeps standard output free for the command's own output
            pass_fds=[*(fd for fd in fds if fd >= 0), *others],
            env=child_environment(environment),
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start))
    process.stdin.close()
    for sock in front_ends:
        sock.close()
    return CoreHandle(process)


def join_core(supervisor: socket.socket) -> socket.socket:
    """Connects a new front end to a running core and returns its socket. `supervisor`: our end of that socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(supervisor, [frame([Join()])], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours
