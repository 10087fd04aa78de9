"""RayReplicas: the core and the ranks of each replica on the nodes of a Ray cluster.

Every replica has a placement group with one bundle per rank, and in each bundle an actor that runs the process
(NodeProcess). Cores connect to the front end over TCP. When a process or its node is lost, the connection of the
core ends; ReplicaClient starts the replica again, in a new placement group, on nodes that are left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any

import msgspec

from slipstream.base.errors import EngineDead, InvalidOption
from slipstream.base.processes import Child, start_child
from slipstream.config.memory import ranks_share_gpu
from slipstream.config.options import Options
from slipstream.ranks.link import SECRET_BYTES, RankLink, accept_ranks, join_rank
from slipstream.transport.client import CoreClient
from slipstream.transport.replica_start import (
    CoreStart,
    check_processors,
    num_replicas,
    of_one_replica,
    start_core,
)
from slipstream.transport.sockets import SocketClient

status = logging.getLogger("slipstream.status")

_EXIT_SECONDS = 10.0  # for a core to exit when its connection is closed
_LOST_SECONDS = 15.0  # for Ray to find out that a node is lost
_HELLO_SECONDS = 10.0  # for a connection to send its secret
_WAIT_TURN = 5.0  # seconds of one call that waits, which cannot be cancelled
_TURNS_PER_WARNING = 24
_UNITS = 10_000  # in which Ray counts parts of a GPU
_PASSED_ON = ("SLIPSTREAM_", "NCCL_")  # beginnings of the names of variables
FIRST_WAIT_SECONDS = 120.0
"""For the cluster to have room at the first start. A replica that is started again waits without a limit."""


@dataclass
class Reservation:
    """The resources of a replica on the cluster, and its actors."""

    group: Any  # ray.util.placement_group.PlacementGroup
    actors: list[Any] = field(default_factory=list)  # of the core, then of the other ranks


class RayReplicas:
    """A ReplicaSource."""

    def __init__(self, options: Sequence[Options]) -> None:
        """Connects to the cluster: the one that this process uses already, that of RAY_ADDRESS or of this machine;
        where there is none, Ray starts one on this machine."""
        self.count = num_replicas(options)
        check_processors(options)
        if self.count > 1 and any(each.enable_expert_parallel for each in options):
            raise InvalidOption(
                "enable_expert_parallel is set with data_parallel_size and distributed_executor_backend ray; engines "
                "that share experts run on one machine: leave one of them out"
            )
        self._ray = import_ray()
        self._owns_ray = not self._ray.is_initialized()
        if self._owns_ray:
            self._ray.init(logging_level="warning")
        self._num_ranks = max(each.tensor_parallel_size for each in options)
        on_cpu = self._is_on_cpu(options)
        given = [each.num_threads for each in options if each.num_threads is not None]
        threads = max(given) if given else self._threads_of_a_rank()
        gpu = {} if on_cpu else {"GPU": _share_of_gpu(self.count * self._num_ranks)}
        self._bundle = {**gpu, "CPU": float(threads) if on_cpu else 1.0}
        self._options = [of_one_replica(each, self.count, on_cpu=on_cpu, num_threads=threads) for each in options]
        self._environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        self._reserved: dict[int, Reservation] = {}
        self._was_reserved: set[int] = set()

    async def start(self, index: int) -> CoreClient:
        reserved = await self._reserve(index)
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((self._ray.util.get_node_ip_address(), 0)) as listener:
            start = msgspec.json.encode(CoreStart(self._options))
            ours = listener.getsockname()[:2]
            try:
                status.info("replica %d runs on %s", index, ", ".join(await self.locations(index)))
                core, *others = reserved.actors
                address = await self._result(
                    core.start_core.remote(start, ours, secret, self._environment, self._num_ranks)
                )
                calls = [
                    actor.start_rank.remote(address, secret, rank, self._environment)
                    for rank, actor in enumerate(others, 1)
                ]
                await asyncio.gather(*map(self._result, calls))
            except self._ray.exceptions.RayError as error:
                raise EngineDead(f"replica {index} did not start on the Ray cluster: {error}") from None
            # it has connected before it answered
            found = await asyncio.to_thread(accept_ranks, listener, secret, [0], _HELLO_SECONDS)
            return await SocketClient.connect(found[0])

    async def ended(self, index: int) -> str | None:
        if (reserved := self._reserved.pop(index, None)) is None:
            return None
        try:
            how = None
            if reserved.actors:
                ending = self._result(reserved.actors[0].wait.remote(_EXIT_SECONDS))
                how = await asyncio.wait_for(ending, _EXIT_SECONDS + _LOST_SECONDS)
            return how
        except (self._ray.exceptions.RayError, TimeoutError):
            return "its node or its Ray worker was lost"
        finally:
            await asyncio.to_thread(self._remove, reserved)

    async def close(self) -> None:
        await asyncio.gather(*(self.ended(index) for index in list(self._reserved)))
        if self._owns_ray:
            await asyncio.to_thread(self._ray.shutdown)

    async def _reserve(self, index: int) -> Reservation:
        """Reserves the resources of a replica and starts its actors, the core's first."""
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = await asyncio.to_thread(placement_group, [self._bundle] * self._num_ranks, strategy="PACK")
        reserved = self._reserved[index] = Reservation(group)
        is_first = index not in self._was_reserved
        turn = min(_WAIT_TURN, FIRST_WAIT_SECONDS)
        num_turns = 0
        while not await asyncio.to_thread(group.wait, turn):
            num_turns += 1
            if is_first and num_turns * turn >= FIRST_WAIT_SECONDS:
                raise EngineDead(f"{await asyncio.to_thread(self._no_room, index)}; add nodes, or {self._advice()}")
            if num_turns % _TURNS_PER_WARNING == 1:
                status.warning("%s; it waits for a node", await asyncio.to_thread(self._no_room, index))
        self._was_reserved.add(index)
        actor = self._ray.remote(NodeProcess)
        for rank in range(self._num_ranks):
            where = PlacementGroupSchedulingStrategy(group, rank)
            num = dict(num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0.0))
            reserved.actors.append(actor.options(scheduling_strategy=where, max_restarts=0, **num).remote())
        return reserved

    async def locations(self, index: int) -> list[str]:
        """The node, and the GPU if it has one, of each rank of a replica."""
        actors = self._reserved[index].actors
        return list(await asyncio.gather(*(self._result(actor.location.remote()) for actor in actors)))

    def _no_room(self, index: int) -> str:
        needed = f"{self._num_ranks} times {_resources(self._bundle)}"
        there = _resources(self._ray.cluster_resources())
        return f"replica {index} needs {needed}, and the Ray cluster has no room for it ({there} in all)"

    def _advice(self) -> str:
        names = [
            ("tensor_parallel_size", self._num_ranks > 1),
            ("data_parallel_size", self.count > 1),
            ("num_threads", self._bundle["CPU"] > 1.0),
        ]
        lower = " or ".join(name for name, matters in names if matters)
        return f"lower {lower}" if lower else "end other work on it"

    def _remove(self, reserved: Reservation) -> None:
        from ray.util import remove_placement_group

        for actor in reserved.actors:
            self._ray.kill(actor)
        remove_placement_group(reserved.group)

    def _result(self, ref: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(ref.future())

    def _is_on_cpu(self, options: Sequence[Options]) -> bool:
        usual = os.environ.get("SLIPSTREAM_DEVICE", "auto")
        asked = {usual if each.device == "auto" else each.device for each in options}
        return "cuda" not in asked and (asked == {"cpu"} or not self._ray.cluster_resources().get("GPU"))

    def _threads_of_a_rank(self) -> int:
        """The CPUs of the cluster, divided evenly; not more than the largest node can give to one rank."""
        nodes = [node["Resources"].get("CPU", 0.0) for node in self._ray.nodes() if node["Alive"]]
        share = sum(nodes) // (self.count * self._num_ranks)
        return max(1, int(min(share, max(nodes, default=1.0))))


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InvalidOption(
            "distributed_executor_backend is ray, and the package ray is not installed; install slipstream[ray], or "
            "use mp for processes of this machine"
        ) from None
    return ray


def _share_of_gpu(num_ranks: int) -> float:
    """The GPUs of one rank: one of its own, but for tests (SHARE_VARIABLE)."""
    return floor(_UNITS / num_ranks) / _UNITS if ranks_share_gpu() else 1.0


def _resources(amounts: dict[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in ("GPU", "CPU") if amounts.get(name)) or "nothing"


# NodeProcess: a Ray actor that runs one process of a replica, its core or one of its ranks, on the actor's node.
#
# The process is the same as without Ray: it gets connected sockets as file descriptors and ends with the actor.

_GPUS = "CUDA_VISIBLE_DEVICES"


class NodeProcess:
    def __init__(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes of children are lost
        self._handle: Child | None = None
        if gpus := _given_gpus():
            os.environ[_GPUS] = gpus

    def location(self) -> str:
        """The node, and the GPU that processes of this actor see."""
        from ray.util import get_node_ip_address

        node = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        return f"{node} (GPU {os.environ[_GPUS]})" if _given_gpus() else node

    def start_core(
        self, start: bytes, front_end: tuple[str, int], secret: bytes, environment: Mapping[str, str], num_ranks: int
    ) -> tuple[str, int] | None:
        """Starts a core that is connected to the front end. `start`: a CoreStart as JSON.

        Returns the address at which its ranks connect, with the same secret; None: there is one rank.
        """
        sock = join_rank(front_end, secret, 0)
        asked = msgspec.json.decode(start, type=CoreStart)
        if num_ranks == 1:
            self._handle = start_core(asked, [sock], environment=environment)
            return None
        address = str(sock.getsockname()[0])  # of this node
        with socket.create_server((address, 0), backlog=num_ranks) as listener:
            asked = msgspec.structs.replace(asked, ranks=RankLink(listener.fileno(), secret))
            self._handle = start_core(asked, [sock], environment=environment)
            return address, int(listener.getsockname()[1])

    def start_rank(self, core: tuple[str, int], secret: bytes, rank: int, environment: Mapping[str, str]) -> None:
        with join_rank(core, secret, rank) as sock:
            file, module = sock.fileno(), "slipstream.ranks.process"
            self._handle = start_child(f"rank {rank}", module, [file], [file], environment=environment)

    def wait(self, seconds: float) -> str | None:
        """Waits for the exit of the process; see `Child.wait`."""
        return None if self._handle is None else self._handle.wait(seconds)


def _given_gpus() -> str:
    """The GPUs that Ray has given to this actor, as CUDA_VISIBLE_DEVICES. Ray sets it too, unless the user
    forbids it (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)."""
    import ray

    return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])
