"""RankProcesses: ranks as child processes of rank 0, with plans in shared memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.dist.group import Group
from slipstream.dist.plan_ring import PlanWriter
from slipstream.engine.child_process import child_environment, how_it_ended
from slipstream.engine.ranks import END, Ranks
from slipstream.errors import EngineDead

_EXIT_SECONDS = 5.0


class RankProcesses(Ranks):
    """The processes of all ranks but the first."""

    plans: PlanWriter

    def __init__(self, config: EngineConfig) -> None:
        """Starts them; they load their part of the model meanwhile."""
        self.num_ranks = config.model.num_ranks
        self.plans = PlanWriter(self.num_ranks - 1)
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-ranks-")
        self.store = Path(self._folder.name) / "store"
        self._processes = [self._spawn(config, rank) for rank in range(1, self.num_ranks)]
        self.plans.close_inherited()

    def connect(self) -> Group:
        if (rank := self.plans.wait_until_ready()) is not None:
            raise EngineDead(f"rank {rank} did not start: {self._how(rank)}; see its last lines in the log")
        return Group(0, self.num_ranks, self.store)

    def dead_rank(self, seconds: float = 0.0) -> str | None:
        for rank in range(1, self.num_ranks):
            try:
                self._processes[rank - 1].wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            return f"rank {rank} has ended: {self._how(rank)}"
        return None

    def close(self) -> None:
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
        self.plans.close()
        self._folder.cleanup()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def _how(self, rank: int) -> str:
        return how_it_ended(self._processes[rank - 1].wait()) or "it exited"

    def _spawn(self, config: EngineConfig, rank: int) -> subprocess.Popen[bytes]:
        files = list(self.plans.files[rank - 1])
        model = msgspec.structs.replace(config.model, rank=rank)
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.engine.rank_process", *map(str, files), str(self.store)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            pass_fds=files,
            env=child_environment(),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(msgspec.structs.replace(config, model=model)))
        process.stdin.close()
        return process
