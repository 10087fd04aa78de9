"""RankProcesses: ranks as child processes of rank 0, with plans in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import msgspec
import torch

from slipstream.base.errors import EngineDead
from slipstream.base.files import OwnedFolder
from slipstream.base.processes import child_environment, how_it_ended
from slipstream.config.config import EngineConfig
from slipstream.config.memory import rank_environment, visible_gpus
from slipstream.device.collectives import Group, announce_end
from slipstream.dist.plan_ring import PlanWriter
from slipstream.engine.ranks import END, Ranks

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
            [sys.executable, "-m", "slipstream.engine.rank_process", *map(str, files), str(self.store)],
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
