"""Workers: the Executor of a model that several ranks share.

Rank 0 runs in the core's process, the others in processes of their own (`rank_process.py`), which are started here
(`local_ranks.py`) or on other nodes (`remote_ranks.py`). Every plan is written once and launched by all ranks; only
rank 0 returns results. A rank that ends, ends the engine: the collectives that wait for it are ended, and the error
names the rank.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from slipstream.contracts.step import Handle, Late, StepPlan, StepResult, TierCopier, TierPlan
from slipstream.dist.plan_codec import encode_late, encode_plan, encode_tier
from slipstream.engine.rank_adapters import RankAdapters
from slipstream.engine.rank_pages import RankPages
from slipstream.engine.rank_watch import wait_for_step
from slipstream.engine.ranks import ADAPTER, FINISH, FREE, LATE, MARK, PLAN, TIER, Ranks


class LocalRunner(Protocol):
    """The part of ModelRunner that an executor uses."""

    def launch(self, plan: StepPlan) -> None: ...
    def finish(self, late: Late | None = None) -> Handle: ...
    def free_queries(self, queries: tuple[int, ...]) -> None: ...
    def close(self) -> None: ...


class Workers:
    """Rank 0 and the processes of the others."""

    def __init__(
        self,
        runner: LocalRunner,
        ranks: Ranks,
        adapters: RankAdapters | None = None,
        tier: TierCopier | None = None,
    ) -> None:
        """`adapters`, `tier`: of rank 0; None: the engine has none."""
        self.runner = runner
        self.adapters = adapters
        self._tier = tier
        self._ranks = ranks
        self.pages: RankPages | None = None  # set if pages are exchanged with other engines
        self._last: Handle | None = None  # the newest step
        self._is_closed = False

    def launch(self, plan: StepPlan) -> None:
        def launch() -> None:
            for message in () if self.adapters is None else self.adapters.take_messages():
                self._ranks.plans.write(ADAPTER, message)
            self._ranks.plans.write(PLAN, encode_plan(plan))
            self.runner.launch(plan)

        self._ranks.explained(launch)

    def finish(self, late: Late | None = None) -> Handle:
        def finish() -> Handle:
            self._ranks.plans.write(*((FINISH, b"") if late is None else (LATE, encode_late(late))))
            return self.runner.finish(late)

        self._last = handle = WorkerHandle(self._ranks.explained(finish), self._ranks)
        return handle

    def free_queries(self, queries: tuple[int, ...]) -> None:
        self._ranks.plans.write(FREE, msgspec.msgpack.encode(queries))
        self.runner.free_queries(queries)

    def copy(self, plan: TierPlan) -> None:
        """As `TierCopier`: every rank copies its part of the pages."""
        assert self._tier is not None, "the cache has no second tier"
        self._ranks.plans.write(TIER, encode_tier(plan))
        self._tier.copy(plan)

    def write_mark(self) -> None:
        """Tells the other ranks that slots of the second tier are reserved after the plans so far."""
        self._ranks.plans.write(MARK)

    # For the loop of the core, which may have nothing to launch

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when `is_waited_for` may have become true."""
        return [self._ranks.file]

    def is_waited_for(self) -> bool:
        """Whether `follow` would raise an error."""
        return self._ranks.death is not None

    def follow(self) -> None:
        """Raises EngineDead if a rank has ended."""
        self._ranks.check()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            wait_for_step(self._last)
            self._ranks.close()
            self.runner.close()


class WorkerHandle:
    """A step of rank 0, whose failure is explained by a rank that has ended."""

    def __init__(self, handle: Handle, ranks: Ranks) -> None:
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
