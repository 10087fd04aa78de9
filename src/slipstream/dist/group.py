"""Group: collectives between the ranks of one model, by torch.distributed: gloo on CPUs, NCCL on GPUs.

The current stream waits for collectives of NCCL, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo, Store

TIMEOUT = timedelta(minutes=10)  # of one collective; a rank that dies ends it at once


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
        `address`: of this rank, at which the others connect. `device`: a GPU; None: the CPU. Returns when all ranks have
        joined."""
        self.rank = rank
        self.size = size
        self.address = address
        self.store: Store = FileStore(str(store), size) if isinstance(store, Path) else store
        self._group: Any
        if device is not None and device.type == "cuda":
            self._group = _new_nccl(self.store, rank, size)
            self.all_reduce(torch.zeros(1, device=device))  # connects: a captured collective must not
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

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """x [size * n, ...] has n rows for each rank. Returns the sum over all ranks of the rows for this one. The
        ranks' parts are added in the order of ranks, so the bits do not depend on sizes."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._group.alltoall_base(out, x.contiguous(), [], []).wait()
        return out.unflatten(0, (self.size, -1)).sum(0)


def _new_nccl(store: Store, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in builds of torch without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)
