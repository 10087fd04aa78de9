"""Workers: the Executor of a model that several ranks share.

Rank 0 runs in the core's process, the others in processes of their own (`rank_process.py`). Every plan is written to
the ring once and launched by all ranks; only rank 0 returns results. A rank that ends, ends the engine: its
connection breaks the next collective, and the error names the rank.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from slipstream.config.config import EngineConfig
from slipstream.dist.group import Group
from slipstream.dist.plan_codec import encode_late, encode_plan
from slipstream.dist.plan_ring import PlanWriter
from slipstream.engine.child_process import child_environment, how_it_ended
from slipstream.engine.executor import Handle
from slipstream.errors import EngineDead
from slipstream.step import Late, StepPlan, StepResult

PLAN, FINISH, LATE, FREE, END = b"p", b"f", b"l", b"q", b"e"
"""Kinds of messages in the ring."""
_EXIT_SECONDS = 5.0

T = TypeVar("T")


class LocalRunner(Protocol):
    """The part of ModelRunner that an executor uses."""

    def launch(self, plan: StepPlan) -> None: ...
    def finish(self, late: Late | None = None) -> Handle: ...
    def free_queries(self, queries: tuple[int, ...]) -> None: ...
    def close(self) -> None: ...


class RankProcesses:
    """The processes of all ranks but the first."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts them; they load their part of the model meanwhile."""
        self.num_ranks = config.model.num_ranks
        self.ring = PlanWriter(self.num_ranks - 1)
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-ranks-")
        self.store = Path(self._folder.name) / "store"
        self._processes = [self._spawn(config, rank) for rank in range(1, self.num_ranks)]
        self.ring.close_inherited()

    def connect(self) -> Group:
        """Waits until all ranks have loaded, and joins them."""
        if (rank := self.ring.wait_until_ready()) is not None:
            raise EngineDead(f"rank {rank} did not start: {self._how(rank)}; see its last lines in the log")
        return Group(0, self.num_ranks, self.store)

    def dead_rank(self, seconds: float = 0.0) -> str | None:
        """Describes a rank that has ended; `seconds`: time to wait for one."""
        for rank in range(1, self.num_ranks):
            try:
                self._processes[rank - 1].wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            return f"rank {rank} has ended: {self._how(rank)}"
        return None

    def explained(self, call: Callable[[], T]) -> T:
        """Calls, and names a rank that has ended where the call fails: a collective only reports a lost connection."""
        try:
            return call()
        except Exception as error:
            if (cause := self.dead_rank(1.0)) is not None:
                raise EngineDead(cause) from error
            raise

    def close(self) -> None:
        try:
            self.ring.write(END)
        except EngineDead:
            pass
        for process in self._processes:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.ring.close()
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends them at once, after a failure."""
        for process in self._processes:
            process.kill()
        self.close()

    def _how(self, rank: int) -> str:
        return how_it_ended(self._processes[rank - 1].wait()) or "it exited"

    def _spawn(self, config: EngineConfig, rank: int) -> subprocess.Popen[bytes]:
        files = list(self.ring.files[rank - 1])
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


class Workers:
    """Rank 0 and the processes of the others."""

    def __init__(self, runner: LocalRunner, ranks: RankProcesses) -> None:
        self.runner = runner
        self._ranks = ranks
        self._is_closed = False

    def launch(self, plan: StepPlan) -> None:
        def launch() -> None:
            self._ranks.ring.write(PLAN, encode_plan(plan))
            self.runner.launch(plan)

        self._ranks.explained(launch)

    def finish(self, late: Late | None = None) -> Handle:
        def finish() -> Handle:
            self._ranks.ring.write(*((FINISH, b"") if late is None else (LATE, encode_late(late))))
            return self.runner.finish(late)

        return WorkerHandle(self._ranks.explained(finish), self._ranks)

    def free_queries(self, queries: tuple[int, ...]) -> None:
        self._ranks.ring.write(FREE, msgspec.msgpack.encode(queries))
        self.runner.free_queries(queries)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._ranks.close()
            self.runner.close()


class WorkerHandle:
    """A step of rank 0, whose failure is explained by a rank that has ended."""

    def __init__(self, handle: Handle, ranks: RankProcesses) -> None:
        self._handle = handle
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._handle, name)

    def wait(self) -> StepResult:
        return self._ranks.explained(self._handle.wait)

    def done(self) -> bool:
        return self._ranks.explained(self._handle.done)

    def wait_until_ended(self) -> None:
        self._ranks.explained(self._handle.wait_until_ended)
