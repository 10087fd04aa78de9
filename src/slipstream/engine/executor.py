"""Executor, TierCopier and WeightUpdate: the interfaces between the core and a device half."""

from __future__ import annotations

from typing import Protocol

from slipstream.step import Late, StepPlan, StepResult, TierPlan


class Handle(Protocol):
    """A launched step. `wait` waits until its result is on the host.

    A step may have no result: its handle `has_no_result`, `wait` returns at once, and `wait_until_ended` waits until
    the device has finished it.
    """

    def wait(self) -> StepResult: ...
    def done(self) -> bool: ...
    def wait_until_ended(self) -> None: ...


class Executor(Protocol):
    """Runs plans, in order, without waiting for them. `finish` gets `late` if the host takes part in a draw."""

    def launch(self, plan: StepPlan) -> None: ...
    def finish(self, late: Late | None = None) -> Handle: ...
    def free_queries(self, queries: tuple[int, ...]) -> None: ...
    def close(self) -> None: ...


class Peers(Protocol):
    """Other processes that take part in steps. The loop of a core without requests waits for them too."""

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when `is_waited_for` may have become true."""

    def is_waited_for(self) -> bool:
        """Whether `follow` has something to do. Called in every turn of the loop."""

    def follow(self) -> None:
        """Does what the other processes wait for. Raises EngineDead if one has ended."""


class TierCopier(Protocol):
    """Copies pages to and from the second cache tier without a step. Implemented in `runner/page_tier.py`."""

    def copy(self, plan: TierPlan) -> None: ...


class Background(Protocol):
    """Work of threads that requests wait for."""

    @property
    def is_waiting(self) -> bool: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class WeightUpdate(Protocol):
    """Exchanges the weights of one model. Implemented in `nn/models/update.py`."""

    @property
    def num_missing(self) -> int:
        """Tensors that were dropped, or changed by an update that failed, and not loaded again."""

    def check_can_update(self) -> None: ...
    def drop(self) -> None: ...
    def update(self, source: object) -> None: ...
