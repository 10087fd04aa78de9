"""GraphPool: captures device work that repeats from step to step as CUDA graphs, and replays it.

Launching a kernel costs the host about 10 us, replaying a whole graph 7 us. Work can be captured if it reads and writes
fixed addresses and its shapes follow from its key; `input_batch.py` and `generate_head.py` are written that way. This
file knows nothing of batches.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

from slipstream.config.memory import sizes_up_to
from slipstream.contracts.step import StepPlan, StepSizes
from slipstream.device.device import Device
from slipstream.runner.features import Size
from slipstream.runner.input_batch import SHORT_LENGTH

T = TypeVar("T")
log = logging.getLogger(__name__)

WHOLE_STEP_ROWS = 8
"""Steps of one token per row with up to so many rows are one graph if their draws need nothing from the host. A second
graph for the draws costs 2 us on the H200, and its first kernel cannot load weights while the last layer runs. All
rows and draws of larger steps would be captured anew for each other way to draw."""
FEW_ROWS = 16  # of short mixed steps: prompts that begin while few rows decode
MAX_GRAPHS = 1024
"""Further work runs eagerly. No graph is ever dropped: other graphs may read its outputs at their fixed addresses."""


class GraphPool:
    """Captured graphs by key. Without graph support, or with `eager`, work is simply run."""

    def __init__(
        self,
        device: Device,
        max_rows: int,
        max_tokens: int,
        *,
        eager: bool,
        output_bytes: tuple[int, int] = (0, 0),
        max_num_seqs: int | None = None,
    ) -> None:
        """`max_rows`: with a row for each draft; `max_num_seqs`: without drafts, None: there are none. `output_bytes`:
        maximum bytes of hidden states, and of results, that captured work leaves."""
        self.device = device
        self.enabled = device.can_graph and not eager
        self.max_rows = max_rows
        self.row_sizes = sizes_up_to(max_rows, first_steps=8) if self.enabled else []
        # Mixed steps are padded to one of two numbers of rows, and to more tokens than that: so their sizes differ from
        # those of decode steps, and without drafts a short prompt is not padded to the tokens of all drafts. Steps with
        # fewer tokens are padded to few rows.
        self._mixed_rows = (max_num_seqs or max_rows, max_rows)
        sizes = sizes_up_to(max_tokens, first_steps=64) if self.enabled else []
        self.token_sizes = [n for n in sizes if n > self._mixed_rows[0]]
        self.short_sizes = [n for n in sizes if FEW_ROWS < n <= self._mixed_rows[0]]
        self._captured: dict[Hashable, tuple[Callable[[], None], Any] | None] = {}
        self._runs_first: int | None = 1  # eager runs before a key is captured; None: nothing is captured
        self._is_starting = False
        self.gave_up = False  # whether a capture has failed
        self._taken: tuple[Callable[[], None], None] | None = None
        self.hidden, self.results = (GraphOutputs(size if self.enabled else 0, device) for size in output_bytes)

    @property
    def num_captured(self) -> int:
        return sum(entry is not None for entry in self._captured.values())

    def size_for(self, plan: StepPlan) -> Size | None:
        """The size to pad a plan to; None: run it unpadded."""
        if plan.joint_sizes is not None:
            return self._joint_size(plan.joint_sizes, is_padding=not len(plan.rows), has_drafts=plan.has_drafts)
        if not self.enabled:
            return None
        num_rows = len(plan.rows)
        total = plan.total_tokens if len(plan.tokens) else num_rows
        if total == num_rows:
            padded = self.rows_for(num_rows)
            if padded is None:
                return None
            is_short = num_rows == 1 and int(plan.lengths[0]) <= SHORT_LENGTH  # without rows: a padding step
            return Size(padded, padded, has_drafts=plan.has_drafts, is_short=is_short)
        if num_rows <= FEW_ROWS and plan.pooling is None and self.token_sizes:
            at = bisect.bisect_left(self.short_sizes, total)
            if at < len(self.short_sizes):
                return Size(self.short_sizes[at], FEW_ROWS)
        rows = self._mixed_rows[num_rows > self._mixed_rows[0]]
        at = bisect.bisect_left(self.token_sizes, max(total, rows + 1))
        if at == len(self.token_sizes):
            return None
        # Only in pooling steps with cache pages: each size may then be captured twice. Generation requests soon decode
        # beside the chunks of others.
        ends = None if plan.pooling is None else plan.pooling.ends
        all_long = ends is not None and bool(plan.new_pages) and int(plan.num_tokens[0]) > 1
        return Size(self.token_sizes[at], rows, all_long)

    def can_replay_jointly(self, plan: StepPlan) -> bool:
        """Whether a graph fits this plan beside any plan of an engine with shared experts, which may have all rows."""
        if self.size_for(plan) is None:
            return False
        return plan.total_tokens == len(plan.rows) or self.token_sizes[-1] > self.max_rows

    def _joint_size(self, joint: StepSizes, *, is_padding: bool, has_drafts: bool) -> Size | None:
        """The size that all engines with shared experts pad a step to, so that their graphs exchange as many tokens.
        Without graphs only a step without rows is padded, to one token."""
        if not (self.enabled and joint.can_replay):
            return Size(1, 1) if is_padding else None
        if joint.is_single:
            padded = self.rows_for(joint.tokens)
            assert padded is not None, "an engine can replay steps that another one cannot"
            return Size(padded, padded, has_drafts=has_drafts)
        at = bisect.bisect_left(self.token_sizes, max(joint.tokens, self.max_rows + 1))
        return Size(self.token_sizes[at], self.max_rows)

    def rows_for(self, num_rows: int) -> int | None:
        """The number of rows to pad a head to; None: run it unpadded."""
        at = bisect.bisect_left(self.row_sizes, num_rows)
        return self.row_sizes[at] if at < len(self.row_sizes) else None

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Device: run `work`, or replay its graph. The result of a replay is at the addresses of the captured run.

        After a start that captured the usual steps, a new key is captured at its first use. Otherwise it runs eagerly
        once and is captured at its second use.
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
        """Reserve memory for temporaries of captured work in one piece. If it grew with the work, smaller work first,
        no existing piece would fit larger work."""

        def take() -> None:
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device.torch_device)[:1].zero_()

        if self.enabled:
            self._taken = self._capture(take)  # dropped, but the graphs' memory pool keeps it while this graph exists

    def clear(self) -> None:
        """Drops all graphs. No work may follow."""
        self._captured.clear()
        self._taken = None

    def _capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T] | None:
        """None if the capture fails. Then nothing more is captured: later work of the step would read outputs that were
        never captured. Existing graphs are still replayed."""
        try:
            return self.device.capture(work)
        except RuntimeError as error:
            if self._is_starting and "out of memory" in str(error):
                raise  # the user must change the configuration
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
        """During start-up: `capture=True` captures new work at its first use, from now on; False captures nothing; None
        changes nothing. An out-of-memory error is raised, and not only logged."""
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
    """Memory for outputs of captured work that the next work reads. All graphs share it, so that a graph keeps no
    output memory of its own; the next graph overwrites it."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        # zeros: a dry run (ops/platform/compile_ahead.py) writes nothing and may read it
        self._memory = device.zeros((num_bytes,), torch.uint8)

    def room(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes <= len(self._memory), f"{num_bytes} bytes are left, and {len(self._memory)} were foreseen"
        return self._memory[:num_bytes]

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return self.room(x.nbytes).view(x.dtype).view(x.shape).copy_(x)
