"""Ranks as threads of this process, and their collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from patience import PATIENCE

T = TypeVar("T")


def run_ranks(num_ranks: int, run: Callable[[int, ThreadRank], T]) -> list[T]:
    """Calls `run` with each rank and its group, at once. Returns the results by rank."""
    group = ThreadGroup(num_ranks)

    def run_one(rank: int) -> T:
        try:
            return run(rank, group.of(rank))
        except BaseException:
            group.barrier.abort()  # the others wait for this rank
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run_one, range(num_ranks)))


class ThreadGroup:
    """The collectives of ranks in threads of this process."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)

    def of(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)


class ThreadRank:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.group.parts[self.rank] = x.clone()
        self.group.barrier.wait()
        total = torch.stack(self.group.parts).sum(0)
        self.group.barrier.wait()
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.group.parts[self.rank] = x.clone()
        self.group.barrier.wait()
        gathered = torch.cat(self.group.parts)
        self.group.barrier.wait()
        return gathered
