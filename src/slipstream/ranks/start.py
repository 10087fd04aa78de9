"""Builds the device half of an engine: a runner, and processes for the other ranks where several share the model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch
from torch.distributed import TCPStore

from slipstream.base.errors import EngineDead
from slipstream.base.files import OwnedFolder
from slipstream.base.processes import child_environment, how_it_ended
from slipstream.config.config import EngineConfig
from slipstream.config.memory import rank_environment, visible_gpus
from slipstream.contracts.step import Executor, TierCopier
from slipstream.device.collectives import TIMEOUT, Group, announce_end
from slipstream.device.device import Device
from slipstream.ranks.link import RankLink, RankStart, accept_rank
from slipstream.ranks.lockstep import SharedExperts
from slipstream.ranks.plan_ring import PlanSockets, PlanWriter
from slipstream.ranks.process import AdapterMemory, RankAdapters, Workers
from slipstream.ranks.rank_pages import RankPages
from slipstream.ranks.ranks import END, Ranks
from slipstream.runner.build import build_runner
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.page_tier import PageTier
from slipstream.runner.runner import ModelRunner


def build_ranks(
    config: EngineConfig,
    link: RankLink | None = None,
    *,
    progress: bool = False,
    device: Device | None = None,
    folder: Path | None = None,
) -> tuple[Executor, ModelRunner, EngineConfig]:
    """The executor, which is the runner itself with one rank; the runner of rank 0; and the configuration with the size
    of cache that was found to fit. `link`: where ranks of other nodes connect; None: they are started here. `folder`:
    of the engines that share the experts, see `SharedExperts`."""
    if config.model.num_engines > 1:
        assert folder is not None, "engines that share experts are started together"
        experts = SharedExperts(config, folder)
        runner, config = build_runner(config, progress=progress, device=device, join=experts.join)
        return experts.executor(runner), runner, config
    ranks = _open_ranks(config, link)
    if ranks is None:
        runner, config = build_runner(config, progress=progress, device=device)
        return runner, runner, config
    try:
        runner, config = ranks.explained(
            lambda: build_runner(config, progress=progress, device=device, join=ranks.join)
        )
        own_adapters = runner.find(AdapterStore)
        adapters = None if own_adapters is None else RankAdapters(own_adapters)
        workers = Workers(runner, ranks, adapters, runner.find(PageTier))
        if config.transfer is not None:
            assert ranks.group is not None
            workers.pages = RankPages(ranks.group, workers.write_mark)
        ranks.explained(ranks.started)
    except BaseException:
        ranks.kill()
        raise
    return workers, runner, config


def rank_pages(executor: Executor) -> RankPages | None:
    """The other ranks as far as they exchange pages with other engines; None: there are none."""
    return executor.pages if isinstance(executor, Workers) else None


def tier_copier(executor: Executor, runner: ModelRunner) -> TierCopier | None:
    """Copies pages on all ranks; None: the cache has no second tier."""
    tier = runner.find(PageTier)
    return executor if isinstance(executor, Workers) and tier is not None else tier


def adapter_memory(executor: Executor, runner: ModelRunner) -> AdapterMemory | None:
    """The memory to which adapters are read, on all ranks; None: the engine has no adapters."""
    return executor.adapters if isinstance(executor, Workers) else runner.find(AdapterStore)


def _open_ranks(config: EngineConfig, link: RankLink | None) -> Ranks | None:
    """The ranks besides this one; None: there are no others."""
    if config.model.num_ranks == 1:
        return None
    return RankProcesses(config) if link is None else RemoteRanks(config, link)


# RankProcesses: ranks as child processes of rank 0, with plans in shared memory.

_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.01
_SLOW_POLL_SECONDS = 0.5


class RankProcesses(Ranks):
    """The processes of all ranks but the first."""

    plans: PlanWriter

    def __init__(self, config: EngineConfig) -> None:
        """Starts them; they load their part of the model meanwhile."""
        super().__init__()
        self.num_ranks = config.model.num_ranks
        self.plans = PlanWriter(self.num_ranks - 1)
        self._folder: OwnedFolder | None = OwnedFolder("ranks")
        self.store = self._folder.path / "store"
        gpus = visible_gpus() if config.device.kind == "cuda" else []
        self._processes = [self._spawn(config, rank, gpus) for rank in range(1, self.num_ranks)]
        self.plans.close_inherited()
        self._files: list[int] = []

    def wait_until_loaded(self) -> None:
        if (rank := self.plans.wait_until_ready()) is not None:
            raise EngineDead(f"rank {rank} did not start: {self._how(rank)}; see its last lines in the log")

    def open_group(self, device: torch.device) -> Group:
        return Group(0, self.num_ranks, self.store, device=device)

    def end_files(self) -> list[int]:
        self._files = [_end_file(process) for process in self._processes]
        return self._files

    def dead_rank(self, seconds: float = 0.0) -> str | None:
        deadline = time.monotonic() + seconds
        while True:
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    return f"rank {rank} has ended: {self._how(rank)}"
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    def end_others(self, how: str) -> None:
        for process in self._processes:
            process.kill()
        if self._folder is not None:
            announce_end(self.store, self.num_ranks, how)

    def started(self) -> None:
        super().started()
        if self.group is not None and not self.group.is_nccl:  # which may read it at any time
            self._remove_store()  # now, since nothing removes it where all ranks are killed

    def close(self) -> None:
        self._stop_watching()
        try:
            self.plans.write(END)
        except EngineDead:
            pass
        for process in self._processes:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.group is not None:
            self.group.abort()
        self.plans.close()
        self._remove_store()
        for file in self._files:
            os.close(file)
        self._close_files()

    def kill(self) -> None:
        self._stop_watching()
        for process in self._processes:
            process.kill()
        self.close()

    def _remove_store(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    def _how(self, rank: int) -> str:
        return how_it_ended(self._processes[rank - 1].wait()) or "it exited"

    def _spawn(self, config: EngineConfig, rank: int, gpus: list[str]) -> subprocess.Popen[bytes]:
        files = list(self.plans.files[rank - 1])
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.ranks.process", *map(str, files), str(self.store)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            pass_fds=files,
            env=child_environment(rank_environment(rank, gpus) if gpus else {}),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(config.of_rank(rank)))
        process.stdin.close()
        return process


def _end_file(process: subprocess.Popen[bytes]) -> int:
    """A file descriptor that becomes readable when the process ends."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(process.pid)
    reads, writes = os.pipe()  # no Linux

    def wait() -> None:
        while process.poll() is None:
            time.sleep(_SLOW_POLL_SECONDS)
        os.close(writes)

    threading.Thread(target=wait, name="slipstream-rank-end", daemon=True).start()
    return reads


# RemoteRanks: ranks that were started on other nodes and connect to rank 0 over TCP.

_CONNECT_SECONDS = 120.0  # for a rank to connect, before it loads its part


class RemoteRanks(Ranks):
    plans: PlanSockets

    def __init__(self, config: EngineConfig, link: RankLink) -> None:
        """Waits until all ranks have connected, and sends each its part of the configuration; they load it
        meanwhile."""
        super().__init__()
        self.num_ranks = config.model.num_ranks
        found: dict[int, socket.socket] = {}
        with socket.socket(fileno=link.listener) as listener:
            self._address = str(listener.getsockname()[0])
            listener.settimeout(_CONNECT_SECONDS)
            while len(found) < self.num_ranks - 1:
                try:
                    rank, sock = accept_rank(listener, link.secret)
                except TimeoutError:
                    missing = sorted(set(range(1, self.num_ranks)) - set(found))
                    raise EngineDead(f"ranks {missing} did not connect within {_CONNECT_SECONDS:g} s") from None
                found[rank] = sock
        self.plans = PlanSockets([found[rank] for rank in sorted(found)])
        self._store = TCPStore(self._address, 0, None, True, TIMEOUT, wait_for_workers=False)
        for rank, sock in found.items():
            start = RankStart(config.of_rank(rank), self._address, self._store.port)
            data = msgspec.msgpack.encode(start)
            sock.sendall(len(data).to_bytes(8, "little") + data)

    def wait_until_loaded(self) -> None:
        if (rank := self.plans.wait_until_ready()) is not None:
            raise EngineDead(f"rank {rank} did not start; see its last lines in the log of its node")

    def open_group(self, device: torch.device) -> Group:
        return Group(0, self.num_ranks, self._store, self._address, device)

    def end_files(self) -> list[int]:
        return self.plans.files

    def dead_rank(self, seconds: float = 0.0) -> str | None:
        rank = self.plans.ended(seconds)
        return None if rank is None else f"rank {rank} has ended: its node or its process was lost"

    def end_others(self, how: str) -> None:
        announce_end(self._store.clone(), self.num_ranks, how)  # the other may wait for an answer
        self.plans.hang_up()  # a rank exits when its connection ends

    def close(self) -> None:
        self._stop_watching()
        try:
            self.plans.write(END)
            self.plans.wait_until_ended(_EXIT_SECONDS)  # they may still read this one's memory
        except EngineDead:
            pass
        if self.group is not None:
            self.group.abort()
        self.plans.close()
        self._close_files()

    def kill(self) -> None:
        self._stop_watching()
        self.plans.close()  # a rank exits when its connection ends
        self._close_files()
