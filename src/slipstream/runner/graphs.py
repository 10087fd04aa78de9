"""GraphPool: device work that is the same from step to step is captured once and replayed.

Launching kernels one by one costs the host about ten microseconds each; replaying a whole captured graph costs seven.
Work qualifies if it reads and writes fixed addresses and its shapes follow from its key: the parts of a step that do
are written that way in `input_batch.py` and `generate.py`. This file knows nothing of batches.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

from slipstream.config.memory import sizes_up_to
from slipstream.device.device import Device
from slipstream.runner.batch.input_batch import Size
from slipstream.step import StepPlan

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_GRAPHS = 1024
"""Work beyond them runs eagerly. None is given up: one graph reads what another has written where it lay then."""


class GraphPool:
    """What was captured, by key. On a device without graphs, or when eager is wanted, work is simply run."""

    def __init__(
        self, device: Device, max_rows: int, max_tokens: int, *, eager: bool, left: tuple[int, int] = (0, 0)
    ) -> None:
        """`left`: the most bytes of hidden states, and of results, that captured work leaves."""
        self.device = device
        self.enabled = device.can_graph and not eager
        self.max_rows = max_rows
        self.row_sizes = sizes_up_to(max_rows, first_steps=8) if self.enabled else []
        # more tokens than rows, so that no size of a mixed step looks like one of single tokens
        self.token_sizes = [n for n in sizes_up_to(max_tokens, first_steps=64) if n > max_rows] if self.enabled else []
        self._captured: dict[Hashable, tuple[Callable[[], None], Any] | None] = {}
        self._runs_first: int | None = 1  # before a key is captured; None: nothing is
        self._is_starting = False
        self.gave_up = False  # a capture has failed
        self._taken: tuple[Callable[[], None], None] | None = None
        self.hidden, self.results = (GraphOutputs(size if self.enabled else 0, device) for size in left)

    @property
    def num_captured(self) -> int:
        return sum(entry is not None for entry in self._captured.values())

    def size_for(self, plan: StepPlan) -> Size | None:
        """What to pad a plan to, so that few sizes serve all; None: run it as it is."""
        if not self.enabled:
            return None
        num_rows = len(plan.rows)
        total = plan.total_tokens if len(plan.tokens) else num_rows
        if total == num_rows:
            padded = self.rows_for(num_rows)
            return None if padded is None else Size(padded, padded)
        at = bisect.bisect_left(self.token_sizes, total)
        if at == len(self.token_sizes):
            return None
        # only of steps that pool, which have cache pages: each size may be captured twice. Texts that are continued
        # soon decode beside others
        ends = None if plan.pooling is None else plan.pooling.ends
        all_long = ends is not None and bool(plan.new_pages) and int(plan.num_tokens[0]) > 1
        return Size(self.token_sizes[at], self.max_rows, all_long)

    def rows_for(self, num_rows: int) -> int | None:
        """What to pad a head of so many rows to; None: run it as it is."""
        at = bisect.bisect_left(self.row_sizes, num_rows)
        return self.row_sizes[at] if at < len(self.row_sizes) else None

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Device: do `work`, or replay what it did when it was captured; its result lies where it lay then.

        It is captured when it first comes, in an engine that has started by capturing the usual; in any other it runs
        eagerly once and is captured the second time.
        """
        if not self.enabled or self._runs_first is None:
            return work()
        entry = self._captured.get(key)
        if entry is None:
            if key not in self._captured and self._runs_first:
                self._captured[key] = None
                return work()
            if self.gave_up or (len(self._captured) > MAX_GRAPHS and self.num_captured >= MAX_GRAPHS):
                return work()
            entry = self._captured[key] = self._capture(work)
            if entry is None:
                return work()
        replay, result = entry
        replay()
        return result

    def take(self, num_bytes: int) -> None:
        """So much for what captured work makes and drops again, in one piece: as it comes, smaller work first, none of
        its pieces would do for larger work."""

        def take() -> None:
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device.torch_device)[:1].zero_()

        if self.enabled:
            self._taken = self._capture(take)  # the memory is dropped, and stays with graphs while there is one

    def _capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T] | None:
        """None if it fails. Then nothing more is captured: what follows in a step would read what was never captured.
        What was captured before is replayed as ever."""
        try:
            return self.device.capture(work)
        except RuntimeError as error:
            if self._is_starting and "out of memory" in str(error):
                raise  # for the user to settle
            self.gave_up = True
            log.warning(
                "work of the device could not be captured (%s: %s); what was not captured before is launched kernel by "
                "kernel from now on, which is slower",
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            return None

    @contextlib.contextmanager
    def starting(self, *, capture: bool | None = None) -> Iterator[None]:
        """While an engine starts: work is captured when it first comes, and from then on; or nothing is; or all is as
        ever. What does not fit into memory meanwhile is told."""
        before = self._runs_first
        if capture is not None:
            self._runs_first = 0 if capture else None
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False
            self._runs_first = 0 if capture else before


class GraphOutputs:
    """Where captured work leaves something for what comes right behind it: one place for all, so that a graph keeps no
    memory of its own. The next to run writes over it."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)

    def room(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes <= len(self._memory), f"{num_bytes} bytes are left, and {len(self._memory)} were foreseen"
        return self._memory[:num_bytes]

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return self.room(x.nbytes).view(x.dtype).view(x.shape).copy_(x)
