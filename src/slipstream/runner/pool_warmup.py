"""PoolWarmUp: likewise for a model that only pools, by plans of prompts that all end with their step."""

from __future__ import annotations

import numpy as np

from slipstream.config.config import SchedulerConfig
from slipstream.nn.models.shortened import shortened
from slipstream.pooling_params import PoolingParams
from slipstream.runner.runner import ModelRunner
from slipstream.runner.warmup import chunk_rows, chunk_sizes, enough_memory, run_plan
from slipstream.step import NO_INTS, NO_PAGES, Ints, PoolAdmission, PoolPlan, StepPlan


class PoolWarmUp:
    def __init__(self, runner: ModelRunner, scheduler: SchedulerConfig, params: PoolingParams, num_groups: int) -> None:
        """`params` name the task that is asked for most. Without cache groups rows are seats of a step alone."""
        self.runner = runner
        self.scheduler = scheduler
        self.params = params
        # a row in the cache is left one position further on
        self._longest = scheduler.max_model_len if scheduler.is_encoder else max(1, scheduler.max_model_len - 1)
        self._no_pages = (NO_PAGES,) * num_groups
        self._seated: Ints = NO_INTS
        self._left_at = 0  # positions that the first row has
        self._num_steps = 0

    def walk(self) -> None:
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
        """Every size: prompts come in all lengths, and steps of them in all sizes."""
        graphs = self.runner.graphs
        if not graphs.enabled:
            return
        with graphs.starting(), enough_memory():
            for size in reversed(graphs.token_sizes):  # the largest first: smaller ones fit into its memory
                for _ in range(2):  # first kernel by kernel, which leaves nothing to be loaded; then it is captured
                    self.prompts(self._filling(size))
            self.leave()

    def prompts(self, counts: Ints, max_length: int = 0) -> None:
        """A step of prompts of so many tokens each. Where rows outlive a step, they may be as long as `max_length` for
        all that the host knows."""
        rows = np.arange(len(counts), dtype=np.int32)
        admitted: tuple[PoolAdmission, ...] = ()
        if not self.scheduler.is_encoder:
            seats = enumerate(counts.tolist())
            # the long rope factors, whose part of the table has all positions
            admitted = tuple(PoolAdmission(row, row, count, 0, self.params, long_rope=True) for row, count in seats)
        self._left_at = int(counts[0])
        lengths = counts if self.scheduler.is_encoder else np.maximum(counts, max_length, dtype=np.int32)
        self._step(rows, counts, lengths, admitted, (self.params,) * len(counts))

    def leave(self) -> None:
        """All rows are given back: a step of one row that nobody sits in says so. It goes on where the row was left."""
        if len(self._seated):
            self._left_at += 1
            self._step(np.zeros(1, np.int32), np.ones(1, np.int32), np.full(1, self._left_at, np.int32), (), ())

    def _run_largest(self) -> None:
        scheduler = self.scheduler
        tokens, most = scheduler.max_num_batched_tokens, min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        # as many prompts as there may be, and as long ones
        self.prompts(np.full(most, max(1, min(tokens // most, self._longest)), np.int32), self._longest)
        self.prompts(self._filling(tokens))
        self.leave()

    def _filling(self, num_tokens: int) -> Ints:
        """As few prompts as have so many tokens together."""
        longest, most = self._longest, self.scheduler.max_num_seqs
        counts = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
        return np.array(counts[:most], np.int32)

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
            released=self._seated,
            admitted=(),
            rows=rows,
            num_tokens=counts,
            lengths=lengths,
            num_drawn=np.zeros(len(rows), np.int32),
            num_given=counts,
            tokens=np.zeros(int(counts.sum()), np.int32),
            new_pages=self._no_pages,
            pooling=PoolPlan(admitted, np.ones(len(rows), np.bool_), params) if params else None,
        )
        self._seated = np.array([admission.row for admission in admitted], np.int32)
        self._num_steps += 1
        run_plan(self.runner, plan)
