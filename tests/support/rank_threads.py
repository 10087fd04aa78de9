"""Ranks of `tensor_parallel_size` as threads of this process: the code of a rank's process, without the seconds that a
process takes to start.

Collectives exchange tensors between the threads: those of gloo, which ranks as processes have, took a sixth of the
time.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from patience import PATIENCE
from slipstream.config.config import EngineConfig
from slipstream.device.collectives import Group
from slipstream.ranks import process, start
from slipstream.ranks.link import RankSocket
from slipstream.ranks.process import run_rank
from slipstream.ranks.ranks import Ranks


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
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-ranks-")
        self._file = Path(self._folder.name) / "store"
        self.errors: list[BaseException] = []
        pairs = [socket.socketpair() for _ in range(1, config.model.num_ranks)]
        self._threads = [
            threading.Thread(target=self._run, args=(theirs,), name=f"rank {rank}", daemon=True)
            for rank, (_, theirs) in enumerate(pairs, 1)
        ]
        for thread in self._threads:
            thread.start()
        super().__init__(config, [ours for ours, _ in pairs], self._file, "127.0.0.1")

    def _run(self, sock: socket.socket) -> None:
        with sock:
            try:
                runner = run_rank(RankSocket(sock))
                assert runner is not None
                runner.close()
            except BaseException as error:
                self.errors.append(error)
                raise

    def how_it_ended(self, rank: int) -> str:
        return str(self.errors)

    def open_group(self, device: torch.device) -> Group:
        return ThreadGroup(0, self.num_ranks, self._file)

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} does not end"
        self._folder.cleanup()
        _exchanges.pop(self._file, None)
        assert not self.errors

    def kill(self) -> None:
        """Threads end with the process."""
        self._stop_watching()


def run_ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on have their ranks in threads."""
    monkeypatch.setattr(start, "start_ranks", RankThreads)
    monkeypatch.setattr(process, "Group", ThreadGroup)
