"""Group: collectives between the ranks of one model, by torch.distributed: gloo on CPUs, NCCL on GPUs.

The current stream waits for collectives of NCCL, so they can be captured in a CUDA graph. What hosts tell each other at
start travels through the store in which the ranks find each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo, Store

from slipstream.base.errors import EngineDead
from slipstream.config.memory import ranks_share_gpu

TIMEOUT = timedelta(minutes=10)  # of one collective; a rank that dies ends it at once
_START_SECONDS = 3600.0  # for all ranks to arrive at the same point of their start
_POLL_SECONDS = 0.005
_INTERFACE = "NCCL_SOCKET_IFNAME"
_ENDED = "slipstream/ended"  # key in the store: how a rank has ended


class Group:
    """The results of every collective have the same bits on all ranks, so that all ranks draw the same tokens."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Path | Store,
        address: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:
        """`store`: a file that all ranks can write, or a torch.distributed store, for the exchange of addresses.
        `address`: of this rank, at which the others connect. `device`: a GPU; None: the CPU. Returns when all ranks
        have joined."""
        self.rank = rank
        self.size = size
        self.address = address
        self.store: Store = FileStore(str(store), size) if isinstance(store, Path) else store
        self.share("joins", rank)  # a library that connects would wait for a rank that has ended
        self._group: Any
        self._is_aborted = False
        self.is_nccl = device is not None and device.type == "cuda"
        if self.is_nccl:
            with _variables(_nccl_variables(rank, address)):
                self._group = _new_nccl(self.store, rank, size)
                self.all_reduce(
                    torch.zeros(1, device=device, dtype=torch.float32)
                )  # connects: a captured collective must not
            torch.cuda.current_stream(device).synchronize()
            return
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = TIMEOUT
        self._group = ProcessGroupGloo(self.store, rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in the memory of x."""
        assert x.is_contiguous(), "a collective needs contiguous memory"
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ...] of all ranks, in the order of ranks: [size * n, ...]."""
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        self._group._allgather_base(out, x.contiguous()).wait()
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The values of rank 0, in the memory of x."""
        assert x.is_contiguous(), "a collective needs contiguous memory"
        self._group.broadcast(x, 0).wait()
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """x [size * n, ...] has n rows for each rank. Returns the sum over all ranks of the rows for this one. The
        ranks' parts are added in the order of ranks, so the bits do not depend on sizes."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._group.alltoall_base(out, x.contiguous(), [], []).wait()
        return out.unflatten(0, (self.size, -1)).sum(0)

    def share(self, name: str, value: int) -> list[int]:
        """The values of all ranks, in their order. Between hosts, at start; each `name` once. Raises EngineDead if a
        rank has ended."""
        self.send(f"{name}/{self.rank}", str(value).encode())
        return [int(self.receive(f"{name}/{rank}")) for rank in range(self.size)]

    def send(self, name: str, data: bytes) -> None:
        """Makes `data` available to `receive` of all ranks."""
        self.store.set(name, data.hex())  # a store may end values at a zero byte

    def receive(self, name: str) -> bytes:
        deadline = time.monotonic() + _START_SECONDS
        while not self.store.check([name]):
            if self.store.check([_ENDED]):
                raise EngineDead(self.store.get(_ENDED).decode())
            if time.monotonic() > deadline:
                raise EngineDead(f"a rank did not arrive at {name} of its start within {_START_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        return bytes.fromhex(self.store.get(name).decode())

    def abort(self) -> None:
        """Ends the collectives that wait for other ranks. Their results are wrong, and no other can follow. From any
        thread. Connections of gloo end with the rank at their other end."""
        if self.is_nccl and not self._is_aborted:
            self._is_aborted = True
            # kernels end at once, but NCCL's function returns when no graph with its collectives is left
            threading.Thread(target=self._group.abort, name="slipstream-abort", daemon=True).start()


class DryGroup(Group):
    """Collectives of a dry run: results of the right shapes, without other ranks."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), "a collective needs contiguous memory"
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        out[: len(x)] = x
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), "a collective needs contiguous memory"
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (self.size, -1)).sum(0)


def announce_end(store: Path | Store, size: int, how: str) -> None:
    """Ends the waits of `receive` on all ranks. `how`: the rank that has ended, and how."""
    # through another connection: others of this process may wait for an answer
    (FileStore(str(store), size) if isinstance(store, Path) else store.clone()).set(_ENDED, how)


def _new_nccl(store: Store, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in builds of torch without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)


def _nccl_variables(rank: int, address: str) -> dict[str, str]:
    # by default torch ends the whole process, which may be the user's, when a communicator was aborted or its watchdog
    # hangs, and a thread of it reads the store
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    if ranks_share_gpu():  # NCCL refuses two ranks on one GPU of one host, so each claims to be a host of its own
        variables |= {"NCCL_HOSTID": f"slipstream-rank-{rank}", _INTERFACE: "lo"}
    elif not address.startswith("127.") and _INTERFACE not in os.environ and (name := interface_of(address)):
        variables[_INTERFACE] = f"={name}"  # ranks reach each other there; NCCL would take any of the node's
    return variables


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for a library that reads them inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Which network interface of this machine has an address.

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
_NAME_BYTES = 16


def interface_of(address: str) -> str | None:
    """The name of the interface; None: none has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode())
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8]) == address:
                return name
    return None
