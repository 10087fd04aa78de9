"""WarmUp: compiles kernels, measures memory and captures the usual steps before the first request.

All of this by running plans, in which rows are admitted, compute, draw and are released as in any other plan. The rows
have no pages, so they write to the null page, which no row reads.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slipstream.base.errors import NotEnoughMemory
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.step import (
    NO_INTS,
    NO_PAGES,
    AdapterPlan,
    Admission,
    Ints,
    PoolAdmission,
    PoolPlan,
    StepPlan,
)
from slipstream.nn.load import shortened
from slipstream.ops.gemm.linear.cublaslt import MIN_ROWS
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.runner.graphs import WHOLE_STEP_ROWS, GraphPool
from slipstream.runner.input_batch import SHORT_LENGTH
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
# the usual sampling features; kernels of rarer ones are compiled at their first use
FEATURES = (
    GREEDY,
    SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
    SamplingParams(temperature=0.0, logprobs=5),
)
KERNEL_SIZES = (2, 16, 32, 64, 80, 96, 128, 256)
"""Rows or tokens up to which each kernel variant is used: a step of each size uses all variants."""
ROW_SIZES = (1, 4, 8, 24, *KERNEL_SIZES)
"""The same for variants that are chosen by rows alone."""
LARGEST = SamplingParams(temperature=0.8, top_p=0.95, logprobs=5)  # the usual features that need the most memory


class Start(Protocol):
    """The steps of a start before the first request, in this order; weights are loaded before the second step."""

    def dry_run(self) -> None:
        """Run one step of each kind that has kernels of its own, and the step that needs the most memory, with one
        layer of each kind."""

    def capture(self) -> None:
        """Capture the usual steps, at every size that steps are padded to."""

    def run_largest(self) -> None:
        """Run the step that needs the most memory, eagerly: it fits, or the start fails with a clear error."""


class WarmUp:
    """Warm-up of a model that generates."""

    def __init__(
        self,
        runner: ModelRunner,
        max_num_seqs: int,
        max_tokens: int,
        max_length: int,
        num_groups: int,
        num_drafts: int = 0,
        *,
        returns_drafts: bool = False,
        joint: bool = False,
    ) -> None:
        """`num_drafts`: maximum number of drafts per row; `returns_drafts`: results have those that a step proposes.
        `joint`: engines that share experts warm up together."""
        self.runner = runner
        self.max_num_seqs = max_num_seqs
        self.max_tokens = max_tokens
        self.max_length = max_length
        self.num_drafts = max(0, min(num_drafts, max_length - 2))
        self.returns_drafts = returns_drafts
        self.joint = joint
        self._no_pages = (NO_PAGES,) * num_groups
        self._admitted_rows: Ints = NO_INTS
        self._row_length = 0  # positions of the first row
        self._num_steps = 0
        self._has_adapters = False  # of rows in the next steps

    def dry_run(self) -> None:
        graphs = self.runner.graphs
        # decode steps
        max_rows = graphs.max_rows
        sizes = sorted({min(n, max_rows) for n in (*ROW_SIZES, self.max_num_seqs, max_rows)})
        with graphs.starting(capture=False), enough_memory(), shortened(self.runner.model):
            # first, because attention for chunks takes longest to compile, and to allocate its memory
            self.largest()
            for number in range(max(len(sizes), len(FEATURES))):
                size = sizes[min(number, len(sizes) - 1)]
                self.decode(size, FEATURES[number] if number < len(FEATURES) else GREEDY)
            for size in chunk_sizes(graphs, self.max_tokens, graphs.short_sizes):
                num_rows = -(-size // max(1, self.max_length - 1))
                if num_rows <= self.max_num_seqs:
                    self.chunks(num_rows, size // num_rows)
            for num_rows, num_tokens in chunk_rows(graphs, self.max_num_seqs, self.max_tokens, self.max_length):
                self.chunks(num_rows, num_tokens)
            if self.runner.find(AdapterStore) is not None:
                self._with_adapters(sizes)
            self.release_rows()

    def _with_adapters(self, sizes: Sequence[int]) -> None:
        """Steps whose rows have a LoRA adapter (slot 0, zeros): decode steps of these sizes, and one chunk."""
        self._has_adapters = True
        for size in sizes:
            self.decode(size, GREEDY)
        self.chunks(1, min(KERNEL_SIZES[-1], self.max_tokens, self.max_length - 1))
        self._has_adapters = False

    def run_largest(self) -> None:
        with self.runner.graphs.starting(capture=False), enough_memory():
            self.largest()
            self.release_rows()

    def capture(self) -> None:
        """Capture greedy decode steps of every padded size; of few rows as one graph, and as one of the forward and one
        of the draws, which serves draws that need data of the host. Other steps are captured at their first use, so
        that the first answers do not wait for them."""
        graphs = self.runner.graphs
        if not graphs.enabled:
            return
        with graphs.starting(capture=True), enough_memory():
            for size in reversed(graphs.row_sizes):  # the largest first: smaller ones fit into its memory
                self.decode(size, GREEDY)
            self._long_row()
            self.runner.whole_steps = False
            for size in graphs.row_sizes:
                if size <= WHOLE_STEP_ROWS:
                    self.decode(size, GREEDY)
            self._long_row()
            self.runner.whole_steps = True
            self.release_rows()

    def decode(self, num_drawn: int, params: SamplingParams) -> None:
        """Steps in which rows compute the token that the device drew last, and draw `num_drawn` tokens: without drafts;
        if there is a drafter, also with proposals, and with as many drafts as possible."""
        if num_drawn <= self.max_num_seqs:
            for num_proposed in sorted({0, self.num_drafts}):
                self._run(np.ones(num_drawn, np.int32), params, host_tokens=False, num_proposed=num_proposed)
        if self.num_drafts and num_drawn > 1:
            each = 1 + self.num_drafts
            num_tokens = np.full(-(-num_drawn // each), each, np.int32)
            num_tokens[-1] -= len(num_tokens) * each - num_drawn
            self._run(num_tokens, params, host_tokens=False, num_proposed=self.num_drafts)

    def _long_row(self) -> None:
        """One row with more tokens than those that have graphs of their own."""
        if self.max_length > SHORT_LENGTH:
            self._run(np.ones(1, np.int32), GREEDY, host_tokens=False, max_length=self.max_length)

    def chunks(self, num_rows: int, num_tokens: int, params: SamplingParams = GREEDY) -> None:
        """A step in which `num_rows` rows compute `num_tokens` host tokens each, and draw."""
        self._run(np.full(num_rows, num_tokens, np.int32), params, host_tokens=True)

    def largest(self) -> None:
        """The maximum number of rows and tokens. The rows' length bounds are the maximum too: attention allocates
        memory by them. With drafts also a step that draws the maximum number of tokens."""
        num_rows = min(self.max_num_seqs, self.max_tokens)
        num_tokens = max(1, min(self.max_tokens // num_rows, self.max_length - 1))
        self._run(np.full(num_rows, num_tokens, np.int32), LARGEST, host_tokens=True, max_length=self.max_length)
        if self.num_drafts:
            self.decode(self.runner.graphs.max_rows, LARGEST)

    def release_rows(self) -> None:
        """Release all rows. A step needs a row, so row 0 computes one more position without being admitted."""
        self._row_length += 1
        at = np.full(1, self._row_length, np.int32)
        self._step(np.zeros(1, np.int32), np.ones(1, np.int32), (), at, host_tokens=False, num_logprobs=None)

    def _run(
        self,
        num_tokens: Ints,
        params: SamplingParams,
        *,
        host_tokens: bool,
        max_length: int = 0,
        num_proposed: int = 0,
    ) -> None:
        rows = np.arange(len(num_tokens), dtype=np.int32)
        admitted = [
            Admission(
                row=int(row),
                number=int(row),
                num_prompt_tokens=1,
                num_known=1,
                num_cached=0,
                params=params,
                seed=0,
                sample=0,
                stop_ids=(),
                history=np.zeros(1, np.int32) if params.needs_history else None,
                long_rope=True,  # the part of the rope table with all positions
            )
            for row in rows
        ]
        self._row_length = int(num_tokens[0])
        lengths = np.maximum(num_tokens, max_length, dtype=np.int32)
        self._step(
            rows,
            num_tokens,
            admitted,
            lengths,
            host_tokens=host_tokens,
            num_logprobs=params.num_logprobs,
            num_proposed=num_proposed,
        )

    def _step(
        self,
        rows: Ints,
        num_tokens: Ints,
        admitted: Sequence[Admission],
        lengths: Ints,
        *,
        host_tokens: bool,
        num_logprobs: int | None,
        num_proposed: int = 0,
    ) -> None:
        plan = StepPlan(
            step=self._num_steps,
            released=self._admitted_rows,
            admitted=tuple(admitted),
            rows=rows,
            num_tokens=num_tokens,
            lengths=lengths,
            num_drawn=np.ones(len(rows), np.int32) if host_tokens else num_tokens,
            num_host_tokens=num_tokens if host_tokens else np.zeros(len(rows), np.int32),
            tokens=np.zeros(int(num_tokens.sum()) if host_tokens else 0, np.int32),
            new_pages=self._no_pages,
            num_logprobs=num_logprobs,
            has_drafts=not host_tokens and bool((num_tokens > 1).any()),
            num_proposed=num_proposed,
            returns_drafts=self.returns_drafts and num_proposed > 0,
            adapters=AdapterPlan(np.zeros(len(rows), np.int32)) if self._has_adapters else None,
        )
        self._admitted_rows = np.array([admission.row for admission in admitted], np.int32)
        self._num_steps += 1
        if self.joint:  # all have the same plan
            plan = dataclasses.replace(plan, joint_sizes=self.runner.sizes_of(plan))
        run_plan(self.runner, plan)


def chunk_sizes(graphs: GraphPool, max_tokens: int, short_sizes: Sequence[int] = ()) -> list[int]:
    """Token counts of steps with chunks that use every kernel variant for few tokens, padded as they will be; and the
    largest count at which gate and up are computed separately, since a larger step may need less memory."""
    padded = graphs.token_sizes
    if not padded:
        return [] if graphs.enabled else sorted({min(size, max_tokens) for size in (*KERNEL_SIZES, MIN_ROWS - 1)})
    padded = [*short_sizes, *padded]
    sizes = {padded[bisect.bisect_left(padded, min(size, padded[-1]))] for size in KERNEL_SIZES}
    return sorted(sizes.union(padded[: bisect.bisect_left(padded, MIN_ROWS)][-1:]))


def chunk_rows(graphs: GraphPool, max_rows: int, max_tokens: int, max_length: int) -> list[tuple[int, int]]:
    """(rows, tokens per row) of unpadded steps whose last layer computes last tokens only: they use every kernel
    variant for few rows."""
    if graphs.enabled:
        return []
    chunks = [(rows, KERNEL_SIZES[-1] // rows + 1) for rows in ROW_SIZES]
    return [(n, each) for n, each in chunks if n <= max_rows and n * each <= max_tokens and each < max_length]


def run_plan(runner: ModelRunner, plan: StepPlan) -> None:
    hot_path = runner.hot_path
    mode, hot_path.mode = hot_path.mode, ""  # work that runs for the first time may synchronise
    try:
        runner.launch(plan)
        runner.finish().wait()
    finally:
        hot_path.mode = mode


class enough_memory:
    """Turns out-of-memory errors during start-up into an error that names the options to change."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            raise NotEnoughMemory(
                "the largest step does not fit into what weights and cache leave of the device's memory; lower "
                "max_num_batched_tokens, max_num_seqs, kv_cache_memory or gpu_memory_utilization"
            ) from error


# PoolWarmUp: warm-up of a model that only pools, by plans in which every prompt ends.


class PoolWarmUp:
    def __init__(self, runner: ModelRunner, scheduler: SchedulerConfig, params: PoolingParams, num_groups: int) -> None:
        """`params` name the model's main task. Without cache groups, rows last for one step only."""
        self.runner = runner
        self.scheduler = scheduler
        self.params = params
        # releasing the rows of a model with a cache computes one more position
        self._longest = scheduler.max_model_len if scheduler.is_encoder else max(1, scheduler.max_model_len - 1)
        self._no_pages = (NO_PAGES,) * num_groups
        self._admitted_rows: Ints = NO_INTS
        self._row_length = 0  # positions of the first row
        self._num_steps = 0

    def dry_run(self) -> None:
        graphs = self.runner.graphs
        max_rows, max_tokens = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        with graphs.starting(capture=False), enough_memory(), shortened(self.runner.model):
            for size in chunk_sizes(graphs, max_tokens):
                self.prompts(self._filling(size))
            if not self.scheduler.is_encoder:
                for num_rows, num_tokens in chunk_rows(graphs, max_rows, max_tokens, self._longest):
                    self.prompts(np.full(num_rows, num_tokens, np.int32))
            self._run_largest()

    def run_largest(self) -> None:
        with self.runner.graphs.starting(capture=False), enough_memory():
            self._run_largest()

    def capture(self) -> None:
        """Capture every size: prompts have all lengths, so steps have all sizes."""
        graphs = self.runner.graphs
        if not graphs.enabled:
            return
        with graphs.starting(), enough_memory():
            for size in reversed(graphs.token_sizes):  # the largest first: smaller ones fit into its memory
                for _ in range(2):  # first eagerly, which loads all kernels; then captured
                    self.prompts(self._filling(size))
            self.release_rows()

    def prompts(self, counts: Ints, max_length: int = 0) -> None:
        """A step of prompts with these token counts. Where rows last longer than a step, `max_length` is the length
        bound of each row."""
        rows = np.arange(len(counts), dtype=np.int32)
        admitted: tuple[PoolAdmission, ...] = ()
        if not self.scheduler.is_encoder:
            rows_and_counts = enumerate(counts.tolist())
            # the long rope factors: the part of the rope table with all positions
            admitted = tuple(
                PoolAdmission(row, row, count, 0, self.params, long_rope=True) for row, count in rows_and_counts
            )
        self._row_length = int(counts[0])
        lengths = counts if self.scheduler.is_encoder else np.maximum(counts, max_length, dtype=np.int32)
        self._step(rows, counts, lengths, admitted, (self.params,) * len(counts))

    def release_rows(self) -> None:
        """Release all rows. A step needs a row, so row 0 computes one more position without being admitted."""
        if len(self._admitted_rows):
            self._row_length += 1
            self._step(np.zeros(1, np.int32), np.ones(1, np.int32), np.full(1, self._row_length, np.int32), (), ())

    def _run_largest(self) -> None:
        scheduler = self.scheduler
        tokens, max_rows = (
            scheduler.max_num_batched_tokens,
            min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        )
        # the maximum number of prompts, each as long as possible
        self.prompts(np.full(max_rows, max(1, min(tokens // max_rows, self._longest)), np.int32), self._longest)
        self.prompts(self._filling(tokens))
        self.release_rows()

    def _filling(self, num_tokens: int) -> Ints:
        """Token counts of as few prompts as have this many tokens together."""
        longest, max_rows = self._longest, self.scheduler.max_num_seqs
        counts = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
        return np.array(counts[:max_rows], np.int32)

    def _step(
        self,
        rows: Ints,
        counts: Ints,
        lengths: Ints,
        admitted: tuple[PoolAdmission, ...],
        params: tuple[PoolingParams, ...],
    ) -> None:
        plan = StepPlan(
            step=self._num_steps,
            released=self._admitted_rows,
            admitted=(),
            rows=rows,
            num_tokens=counts,
            lengths=lengths,
            num_drawn=np.zeros(len(rows), np.int32),
            num_host_tokens=counts,
            tokens=np.zeros(int(counts.sum()), np.int32),
            new_pages=self._no_pages,
            pooling=PoolPlan(admitted, np.ones(len(rows), np.bool_), params) if params else None,
        )
        self._admitted_rows = np.array([admission.row for admission in admitted], np.int32)
        self._num_steps += 1
        run_plan(self.runner, plan)
