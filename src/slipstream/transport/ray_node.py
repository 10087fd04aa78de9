"""NodeProcess: a Ray actor that runs one process of a replica, its core or one of its ranks, on the actor's node.

The process is the same as without Ray: it gets connected sockets as file descriptors and ends with the actor.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from slipstream.base.processes import child_environment
from slipstream.engine.rank_link import RankLink, join_rank, open_socket
from slipstream.transport.spawn import CoreHandle, CoreStart, start_core

_GPUS = "CUDA_VISIBLE_DEVICES"


class NodeProcess:
    def __init__(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes of children are lost
        self._handle: CoreHandle | None = None
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
        sock = open_socket(front_end)
        sock.sendall(secret)
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
            process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.engine.rank_process", str(sock.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=[sock.fileno()],
                env=child_environment(environment),
            )
        self._handle = CoreHandle(process)

    def wait(self, seconds: float) -> str | None:
        """Waits for the exit of the process; see `CoreHandle.wait`."""
        return None if self._handle is None else self._handle.wait(seconds)


def _given_gpus() -> str:
    """The GPUs that Ray has given to this actor, as CUDA_VISIBLE_DEVICES. Ray sets it too, unless the user
    forbids it (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)."""
    import ray

    return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])
