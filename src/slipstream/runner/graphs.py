"""GraphPool: device work that is the same from step to step is captured once and replayed.

Launching kernels one by one costs the host about ten microseconds each; replaying a whole captured graph costs seven.
Work qualifies if it reads and writes fixed addresses and its shapes follow from its key: the parts of a step that do
are written that way in `input_batch.py` and `generate.py`. This file knows nothing of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from slipstream.device.device import Device
from slipstream.step import StepPlan

T = TypeVar("T")


class GraphPool:
    """What was captured, by key. On a device without graphs, or when eager is wanted, work is simply run."""

    def __init__(self, device: Device, max_rows: int, *, eager: bool) -> None:
        self.device = device
        self.enabled = device.can_graph and not eager
        self.buckets = bucket_sizes(max_rows) if self.enabled else []
        self._captured: dict[Hashable, tuple[Callable[[], None], Any] | None] = {}

    @property
    def num_captured(self) -> int:
        return sum(entry is not None for entry in self._captured.values())

    def size_for(self, plan: StepPlan) -> int | None:
        """Rows to pad a plan to, so that few sizes serve all; None: run it as it is."""
        num_rows = len(plan.rows)
        if not self.enabled or (len(plan.tokens) and plan.total_tokens > num_rows):
            return None
        return next((size for size in self.buckets if size >= num_rows), None)

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Device: do `work`, or replay what it did when it was captured; its result lies where it lay then.

        The first time it runs eagerly, which also compiles and tunes what it calls. The second time it is captured.
        """
        if not self.enabled:
            return work()
        if key not in self._captured:
            self._captured[key] = None
            return work()
        entry = self._captured[key]
        if entry is None:
            entry = self._captured[key] = self.device.capture(work)
        replay, result = entry
        replay()
        return result


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then in steps that waste at most an eighth."""
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size += size if size < 16 else max(8, 1 << (size.bit_length() - 3))
    return [*sizes, max_rows]
