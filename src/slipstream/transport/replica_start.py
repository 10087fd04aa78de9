"""ReplicaProcesses: starts the core process of each replica, on its own GPU or with its share of the CPU threads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.base.files import OwnedFolder
from slipstream.base.host import num_cores
from slipstream.base.processes import Child, start_child
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
        self._handles: dict[int, Child] = {}
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


def spawn_core(
    options: list[Options],
    num_front_ends: int = 1,
    supervisor: socket.socket | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    engine: int = 0,
    folder: str | None = None,
) -> tuple[Child, list[socket.socket]]:
    """Starts a core for these models. Returns its process, and one socket per front end.

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
) -> Child:
    """Starts a core process over connected sockets, which are closed here."""
    files = [sock.fileno() for sock in front_ends]
    given = [*files, *(() if supervisor is None else (supervisor.fileno(),))]
    others = () if start.ranks is None else (start.ranks.listener,)
    arguments = [-1 if supervisor is None else supervisor.fileno(), *files]
    module, data = "slipstream.transport.core_process", msgspec.json.encode(start)
    core = start_child("the engine core", module, arguments, [*given, *others], data, environment)
    for sock in front_ends:
        sock.close()
    return core


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
