"""Ranks of `tensor_parallel_size` as threads of this process: the code of a rank's process, with plans through a ring
in shared memory, without the seconds that a process takes to start.

Collectives exchange tensors between the threads: those of gloo, which ranks as processes have, took a sixth of the
time.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed import FileStore

from patience import PATIENCE
from slipstream.config.config import EngineConfig
from slipstream.device.collectives import Group, announce_end
from slipstream.ranks import process, start
from slipstream.ranks.link import RankLink
from slipstream.ranks.plan_ring import PlanReader, PlanWriter
from slipstream.ranks.process import run_rank
from slipstream.ranks.ranks import END, Ranks


class _Exchange:
    """Where the threads of an engine put their parts of a collective."""

    def __init__(self, size: int) -> None:
        # two sets in turns: a rank begins the next collective while others still read the parts of this one
        self.parts = [[torch.empty(0)] * size for _ in range(2)]
        self.barrier = threading.Barrier(size, timeout=PATIENCE)


_exchanges: dict[Path, _Exchange] = {}  # by the file in which the ranks of an engine find each other


class ThreadGroup(Group):
    """The group of a rank that is a thread. All ranks add parts in the same order, so results have the same bits."""

    def __init__(
        self, rank: int, size: int, store: Path, address: str = "127.0.0.1", device: torch.device | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.address = address
        self.store = FileStore(str(store), size)
        self.is_nccl = False
        self._exchange = _exchanges.setdefault(store, _Exchange(size))
        self._turn = 0
        self.share("joins", rank)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.is_contiguous(), "a collective needs contiguous memory"
        parts = self._exchange.parts[self._turn]
        self._turn ^= 1
        parts[self.rank] = x.clone()
        self._exchange.barrier.wait()
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        torch.sum(torch.stack(self._gather(x)), 0, out=x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(x.contiguous()))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._gather(x)[0])


class RankThreads(Ranks):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.num_ranks = config.model.num_ranks
        self.plans = PlanWriter(self.num_ranks - 1)
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-ranks-")
        self.store = Path(self._folder.name) / "store"
        self.errors: list[BaseException] = []
        self._ends = [os.pipe() for _ in range(1, self.num_ranks)]
        self._threads = [
            threading.Thread(target=self._run, args=(config, rank), name=f"rank {rank}", daemon=True)
            for rank in range(1, self.num_ranks)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, config: EngineConfig, rank: int) -> None:
        files = self.plans.files[rank - 1]
        try:
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(config.of_rank(rank)), type=EngineConfig)
            run_rank(sent, PlanReader(*files), self.store).close()
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            os.close(files.messages)
            os.close(files.acknowledgements)
            os.close(self._ends[rank - 1][1])

    def wait_until_loaded(self) -> None:
        rank = self.plans.wait_until_ready()
        assert rank is None, f"rank {rank} did not start: {self.errors}"

    def open_group(self, device: torch.device) -> Group:
        return ThreadGroup(0, self.num_ranks, self.store)

    def end_files(self) -> list[int]:
        return [reads for reads, _ in self._ends]

    def dead_rank(self, seconds: float = 0.0) -> str | None:
        for thread in self._threads:
            thread.join(seconds)
            if not thread.is_alive():
                return f"{thread.name} has ended: {self.errors}"
        return None

    def end_others(self, how: str) -> None:
        announce_end(self.store, self.num_ranks, how)

    def close(self) -> None:
        self._stop_watching()
        self.plans.write(END)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} does not end"
        self.plans.close()
        self._folder.cleanup()
        _exchanges.pop(self.store, None)
        for reads, _ in self._ends:
            os.close(reads)
        self._close_files()
        assert not self.errors

    def kill(self) -> None:
        """Threads end with the process."""
        self._stop_watching()


def run_ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on have their ranks in threads."""

    def open_ranks(config: EngineConfig, link: RankLink | None) -> Ranks | None:
        return None if config.model.num_ranks == 1 else RankThreads(config)

    monkeypatch.setattr(start, "_open_ranks", open_ranks)
    monkeypatch.setattr(process, "Group", ThreadGroup)
