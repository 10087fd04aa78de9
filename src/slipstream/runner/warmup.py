"""WarmUp: kernels compiled, memory measured and the usual steps captured before the first request comes.

All of it by running plans, in which rows are admitted, compute, draw and are released as in any others. They have no
pages, so what they compute falls into the null page and nobody reads it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slipstream.errors import NotEnoughMemory
from slipstream.nn.models.shortened import shortened
from slipstream.ops.linear.cublaslt_tuned import MIN_ROWS
from slipstream.params import SamplingParams
from slipstream.runner.graphs import GraphPool
from slipstream.runner.runner import ModelRunner
from slipstream.step import NO_INTS, NO_PAGES, Admission, Ints, StepPlan

GREEDY = SamplingParams(temperature=0.0)
# what heads are made of; kernels of what is rarer compile when it is first asked for
HEADS = (
    GREEDY,
    SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
    SamplingParams(temperature=0.0, logprobs=5),
)
KERNEL_SIZES = (2, 16, 32, 64, 128, 256)
"""Rows or tokens up to which kernels differ: a step of each meets them all."""
ROW_SIZES = (1, 4, 8, 24, *KERNEL_SIZES)
"""Likewise, of rows alone."""
LARGEST = SamplingParams(temperature=0.8, top_p=0.95, logprobs=5)  # the head that takes the most memory of the usual


class Start(Protocol):
    """What happens before the first request, in this order; weights are there from the second on."""

    def walk(self) -> None:
        """One step of each kind that has kernels of its own, for `compiling_ahead`, and the one that takes the most
        memory."""

    def capture(self) -> None:
        """The usual steps, at the sizes that they are padded to."""

    def run_largest(self) -> None:
        """The step that takes the most memory, launched kernel by kernel: it fits, or the user hears of it."""


class WarmUp:
    """Of a model that generates."""

    def __init__(
        self, runner: ModelRunner, max_num_seqs: int, max_tokens: int, max_length: int, num_groups: int
    ) -> None:
        self.runner = runner
        self.max_num_seqs = max_num_seqs
        self.max_tokens = max_tokens
        self.max_length = max_length
        self._no_pages = (NO_PAGES,) * num_groups
        self._seated: Ints = NO_INTS
        self._left_at = 0  # positions that the first row has
        self._num_steps = 0

    def walk(self) -> None:
        graphs = self.runner.graphs
        # steps of one token a row
        sizes = sorted({min(n, self.max_num_seqs) for n in (*ROW_SIZES, self.max_num_seqs)})
        with graphs.starting(capture=False), enough_memory(), shortened(self.runner.model):
            # first, because attention of chunks takes longest to compile; and so that its memory is taken
            self.largest()
            for number in range(max(len(sizes), len(HEADS))):
                size = sizes[min(number, len(sizes) - 1)]
                self.decode(size, HEADS[number] if number < len(HEADS) else GREEDY)
            for size in chunk_sizes(graphs, self.max_tokens):
                num_rows = -(-size // max(1, self.max_length - 1))
                if num_rows <= self.max_num_seqs:
                    self.chunks(num_rows, size // num_rows)
            for num_rows, num_tokens in chunk_rows(graphs, self.max_num_seqs, self.max_tokens, self.max_length):
                self.chunks(num_rows, num_tokens)
            self.leave()

    def run_largest(self) -> None:
        with self.runner.graphs.starting(capture=False), enough_memory():
            self.largest()
            self.leave()

    def capture(self) -> None:
        """Steps in which all rows decode and take their likeliest token, at every size they are padded to; the rest is
        captured when it first comes, by the step that needs it, so that answers do not wait for all of it."""
        graphs = self.runner.graphs
        if not graphs.enabled:
            return
        with graphs.starting(capture=True), enough_memory():
            for size in reversed(graphs.row_sizes):  # the largest first: smaller ones fit into its memory
                self.decode(size, GREEDY)
            self.leave()

    def decode(self, num_rows: int, params: SamplingParams) -> None:
        """A step in which so many rows compute a token that the device drew before."""
        self._run(np.ones(num_rows, np.int32), params, given=False)

    def chunks(self, num_rows: int, num_tokens: int, params: SamplingParams = GREEDY) -> None:
        """A step in which so many rows compute so many given tokens each, and draw."""
        self._run(np.full(num_rows, num_tokens, np.int32), params, given=True)

    def largest(self) -> None:
        """As many rows and tokens as there may be. For all that the host knows of them, rows are as long as any can be:
        attention takes memory by that."""
        num_rows = min(self.max_num_seqs, self.max_tokens)
        num_tokens = max(1, min(self.max_tokens // num_rows, self.max_length - 1))
        self._run(np.full(num_rows, num_tokens, np.int32), LARGEST, given=True, max_length=self.max_length)

    def leave(self) -> None:
        """All rows are given back: a step of one row that nobody sits in says so. It goes on where the row was left."""
        self._left_at += 1
        at = np.full(1, self._left_at, np.int32)
        self._step(np.zeros(1, np.int32), np.ones(1, np.int32), (), at, given=False, num_logprobs=None)

    def _run(self, num_tokens: Ints, params: SamplingParams, *, given: bool, max_length: int = 0) -> None:
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
                long_rope=True,  # whose part of the rope table has all positions
            )
            for row in rows
        ]
        self._left_at = int(num_tokens[0])
        lengths = np.maximum(num_tokens, max_length, dtype=np.int32)
        self._step(rows, num_tokens, admitted, lengths, given=given, num_logprobs=params.num_logprobs)

    def _step(
        self,
        rows: Ints,
        num_tokens: Ints,
        admitted: Sequence[Admission],
        lengths: Ints,
        *,
        given: bool,
        num_logprobs: int | None,
    ) -> None:
        plan = StepPlan(
            step=self._num_steps,
            released=self._seated,
            admitted=tuple(admitted),
            rows=rows,
            num_tokens=num_tokens,
            lengths=lengths,
            num_drawn=np.ones(len(rows), np.int32),
            num_given=num_tokens if given else np.zeros(len(rows), np.int32),
            tokens=np.zeros(int(num_tokens.sum()) if given else 0, np.int32),
            new_pages=self._no_pages,
            num_logprobs=num_logprobs,
        )
        self._seated = np.array([admission.row for admission in admitted], np.int32)
        self._num_steps += 1
        run_plan(self.runner, plan)


def chunk_sizes(graphs: GraphPool, max_tokens: int) -> list[int]:
    """Tokens of steps with chunks that meet every kernel which is made for few tokens, padded as they will be; and the
    most with which gates and ups are made before their product, for which a larger step may take less memory."""
    padded = graphs.token_sizes
    if not padded:
        return [] if graphs.enabled else sorted({min(size, max_tokens) for size in (*KERNEL_SIZES, MIN_ROWS - 1)})
    sizes = {padded[bisect.bisect_left(padded, min(size, padded[-1]))] for size in KERNEL_SIZES}
    return sorted(sizes.union(padded[: bisect.bisect_left(padded, MIN_ROWS)][-1:]))


def chunk_rows(graphs: GraphPool, max_rows: int, max_tokens: int, max_length: int) -> list[tuple[int, int]]:
    """Rows, and tokens of each, of steps that are not padded and in which the last layer is for last tokens alone: they
    meet every kernel which is made for few rows."""
    if graphs.enabled:
        return []
    chunks = [(rows, KERNEL_SIZES[-1] // rows + 1) for rows in ROW_SIZES]
    return [(n, each) for n, each in chunks if n <= max_rows and n * each <= max_tokens and each < max_length]


def run_plan(runner: ModelRunner, plan: StepPlan) -> None:
    hot_path = runner.hot_path
    mode, hot_path.mode = hot_path.mode, ""  # what is used for the first time may wait
    try:
        runner.launch(plan)
        runner.finish().wait()
    finally:
        hot_path.mode = mode


class enough_memory:
    """Running out of the device's memory while starting is the user's to settle."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            raise NotEnoughMemory(
                "the largest step does not fit into what weights and cache leave of the device's memory; lower "
                "max_num_batched_tokens, max_num_seqs, kv_cache_memory or gpu_memory_utilization"
            ) from error
