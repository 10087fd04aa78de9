"""PoolWarmUp: warm-up of a model that only pools, by plans in which every prompt ends."""

from __future__ import annotations

import numpy as np

from slipstream.config.config import SchedulerConfig
from slipstream.contracts.step import NO_INTS, NO_PAGES, Ints, PoolAdmission, PoolPlan, StepPlan
from slipstream.nn.models.shortened import shortened
from slipstream.params.pooling import PoolingParams
from slipstream.runner.runner import ModelRunner
from slipstream.runner.warmup import chunk_rows, chunk_sizes, enough_memory, run_plan


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
