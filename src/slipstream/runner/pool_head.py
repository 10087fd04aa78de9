"""PoolHead: computes vectors, scores and token weights from hidden states, for prompts that end with the step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
import torch

from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.step import NO_POOLING, PoolPlan, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import BatchView
from slipstream.nn.pooling_heads import Heads
from slipstream.params.pooling import PoolingParams
from slipstream.runner.features import Gathered, Size, StepFeature
from slipstream.runner.graphs import GraphPool
from slipstream.runner.pool_methods import PoolMode, PoolModes, finish, pool_all, take_hidden
from slipstream.runner.pool_results import PooledRow, PoolHandle, ResultBlock, by_mode, skipped_in_step
from slipstream.runner.pool_tokens import ChunkState, PoolWork, TokenVectors
from slipstream.runner.results import Head, ResultRing
from slipstream.runner.staging import Upload

Vectors = Callable[[BatchView, torch.Tensor], list[torch.Tensor]]
"""Device: from a step's hidden states to the vectors of several blocks of results."""


class PoolHead(StepFeature):
    """Also a `StepFeature`: keeps the state of prompts that take several steps."""

    def __init__(
        self,
        heads: Heads | None,
        info: PoolingInfo,
        vocab_size: int,
        chunks: ChunkState,
        results: ResultRing,
        graphs: GraphPool,
        dtype: torch.dtype,
        hidden_size: int | None = None,
    ) -> None:
        """Without heads an embedding is a hidden state. `dtype`: of the results; `hidden_size`: if the forward returns
        more than hidden states, for a drafter."""
        self.hidden_size = hidden_size
        self.heads = heads
        self.methods = info.methods
        self.modes = PoolModes(info, None if heads is None else heads.sparse_by, vocab_size)
        self.chunks = chunks
        self.token_vectors = TokenVectors(heads, chunks, dtype)
        self.results = results
        self.graphs = graphs
        self.dtype = dtype
        self._numpy_dtype = np.dtype(np.float64 if dtype is torch.float64 else np.float32)
        self._freed: tuple[int, ...] = ()

    def apply(self, plan: StepPlan) -> None:
        self.chunks.apply(plan)
        self._freed = () if plan.pooling is None else plan.pooling.freed_queries

    def flush(self, upload: Upload) -> None:
        if self._freed:
            upload.then(self.free_queries(self._freed))

    def free_queries(self, queries: tuple[int, ...]) -> Callable[[], None]:
        return self.token_vectors.free_queries(queries)

    def wants_all(self, plan: StepPlan) -> bool:
        pool_plan = plan.pooling or NO_POOLING
        if pool_plan.ends is None and not self.chunks.admissions:
            return False
        if self.methods != ("last",):
            return True
        params = pool_plan.params
        if len(params) < len(plan.rows):  # other prompts may continue
            params += tuple(admission.params for admission in self.chunks.admissions.values())
        return any(self.modes.of(own).task not in ("embed", "classify") for own in _distinct(params))

    def prepare(
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: upload what the step's rows need; None if the step has no row of a pooling request."""
        pool_plan = plan.pooling or NO_POOLING
        if pool_plan.ends is None and not self.chunks.admissions:
            return None
        if len(pool_plan.params) == len(plan.rows):  # every prompt ends
            mode, *others = {self.modes.of(params) for params in _distinct(pool_plan.params)}
            in_one_step = self.methods == ("last",) or np.array_equal(plan.lengths, plan.num_tokens)
            # skipped tokens need an upload
            if not others and mode.task in ("embed", "classify") and in_one_step and not mode.skip:
                return self._prepare_alike(plan, mode, size, only_last)
        rows = self._pooled_rows(plan, pool_plan)
        if not rows:
            return None
        before, blocks, jobs = self.token_vectors.prepare(rows, upload)
        vector_blocks, pool_vectors = self._prepare_vectors(rows, upload, only_last)
        blocks += vector_blocks

        def run(batch: Gathered, hidden: torch.Tensor) -> Iterator[Iterable[torch.Tensor]]:
            for work in before:
                work(hidden)
            for job in jobs:
                yield job(hidden)
            if pool_vectors is not None:
                yield from ([vectors] for vectors in pool_vectors(batch.view, hidden))

        return self._head(blocks, run)

    def _prepare_alike(self, plan: StepPlan, mode: PoolMode, size: Size | None, only_last: bool) -> Head:
        """Host: every prompt of the step ends with it, and all have one mode. Nothing is uploaded."""
        count = len(plan.rows)
        # a graph for each truncated width would leave no room for other graphs: truncate after the replay
        common = mode if mode.cut is None else mode._replace(width=0, cut=None, finish="identity")

        def work(batch: Gathered, hidden: torch.Tensor) -> torch.Tensor:
            return self._finish(hidden if only_last else pool_all(self.methods, batch.view, hidden), common)

        def run(batch: Gathered, hidden: torch.Tensor) -> list[Iterable[torch.Tensor]]:
            if size is None:
                vectors = work(batch, hidden)
            else:
                vectors = self.graphs.run(
                    ("pool", common, batch.graph), lambda: self.graphs.results.put(work(batch, hidden))
                )[:count]
            return [[vectors if common is mode else finish(vectors, mode)]]

        return self._head([ResultBlock(mode.width, None, None, count)], run)

    def _head(
        self, blocks: list[ResultBlock], run: Callable[[Gathered, torch.Tensor], Iterable[Iterable[torch.Tensor]]]
    ) -> Head:
        if self.hidden_size is not None:
            run = _of_hidden(run, self.hidden_size)
        shape = ResultBlock.lay_out(blocks, self._numpy_dtype)
        if not shape.num_bytes:  # no prompt ends, or no result is copied
            nothing = np.zeros(0, np.uint8)
            handle = (lambda sent: PoolHandle(sent.copied, shape, nothing, blocks)) if blocks else None
            return Head(lambda batch, hidden: _drop(run(batch, hidden)), handle)
        span = self.results.open(shape)

        def write(batch: Gathered, hidden: torch.Tensor) -> None:
            for index, (block, parts) in enumerate(zip(blocks, run(batch, hidden), strict=True)):
                first = 0
                for vectors in parts:
                    for name, values in block.name(index, vectors.to(self.dtype)).items():
                        span.write_part(name, first, values)
                    first += len(vectors)

        return Head(write, lambda sent: PoolHandle(sent.copied, shape, span.find(sent), blocks))

    def _modes_of(self, pool_plan: PoolPlan) -> list[PoolMode]:
        """The mode of each prompt that ends."""
        known = {id(params): self.modes.of(params) for params in _distinct(pool_plan.params)}
        return [known[id(params)] for params in pool_plan.params]

    def _pooled_rows(self, plan: StepPlan, pool_plan: PoolPlan) -> list[PooledRow]:
        ending = np.zeros(len(plan.rows), np.bool_) if pool_plan.ends is None else pool_plan.ends
        ends = np.cumsum(plan.num_tokens)
        first_token = np.cumsum(plan.num_host_tokens) - plan.num_host_tokens
        modes = iter(self._modes_of(pool_plan))
        queries = iter([-1] * len(pool_plan.params) if pool_plan.queries is None else pool_plan.queries.tolist())
        admissions = self.chunks.admissions
        rows: list[PooledRow] = []
        num_ending = 0
        for index, (row, count, length) in enumerate(
            zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.lengths.tolist(), strict=True)
        ):
            if not ending[index] and row not in admissions:
                continue  # a generation request
            start = int(ends[index]) - count
            tokens = plan.tokens[first_token[index] : first_token[index] + count]
            if ending[index]:
                pooled = PooledRow(index, row, start, tokens, length, next(modes), next(queries), num_ending)
                num_ending += 1
            else:
                mode = self.modes.of(admissions[row].params)
                pooled = PooledRow(index, row, start, tokens, length, mode, -1, -1)
            rows.append(pooled)
        return rows

    def _prepare_vectors(
        self, rows: list[PooledRow], upload: Upload, only_last: bool
    ) -> tuple[list[ResultBlock], Vectors | None]:
        """One vector for each prompt that ends, by the model's method, then the final operations of each mode."""
        own_rows = [row for row in rows if row.mode.task in ("embed", "classify")]
        ending = [row for row in own_rows if row.ends]
        pool: PoolWork
        if self.chunks.reduced and any(not m.ends or m.has_begun for m in own_rows):
            pool = self.chunks.pool_vectors(own_rows, upload)
        elif not ending:
            return [], None
        else:
            pool = self._pool_in_one_step(ending, upload, only_last)

        groups = by_mode(ending)
        blocks = [ResultBlock(own.width, [m.result for m in group], None, len(group)) for own, group in groups.items()]
        where = {row.index: i for i, row in enumerate(ending)}
        picks = {
            own: take_hidden(np.array([where[m.index] for m in group], np.int64), upload)
            for own, group in groups.items()
            if len(groups) > 1
        }

        def by_group(view: BatchView, hidden: torch.Tensor) -> list[torch.Tensor]:
            pooled = pool(view, hidden)
            return [self._finish(picks[own](pooled) if own in picks else pooled, own) for own in groups]

        return blocks, by_group

    def _pool_in_one_step(self, ending: list[PooledRow], upload: Upload, only_last: bool) -> PoolWork:
        """Host: a vector for each of these rows, whose prompts are in one step or need their last token only."""
        take = take_hidden(np.array([m.index for m in ending], np.int64), upload)
        counts_none = [row.mode.skip >= row.length for row in ending]
        none = upload.put(np.array(counts_none, np.bool_)) if any(counts_none) else None
        skipped = None if self.methods == ("last",) else skipped_in_step(ending, upload)

        def pool(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
            if only_last:
                pooled = take(hidden)
            else:
                skips = None if skipped is None else upload.tensor(skipped)
                pooled = take(pool_all(self.methods, view, hidden, skips))
            if none is None or self.methods != ("last",):
                return pooled
            return torch.where(upload.tensor(none).unsqueeze(1), 0, pooled)

        return pool

    def _finish(self, pooled: torch.Tensor, mode: PoolMode) -> torch.Tensor:
        """Device: from pooled hidden states to results."""
        if mode.task == "classify":
            assert self.heads is not None, "a model without heads has no classes"
            return finish(self.heads.classify(pooled), mode)
        return finish(pooled.to(self.dtype) if self.heads is None else self.heads.embed(pooled), mode)


def _distinct(params: tuple[PoolingParams, ...]) -> Collection[PoolingParams]:
    """Distinct objects: usually all rows share one, and identity is cheaper to test than equality."""
    return {id(own): own for own in params}.values()


def _drop(results: Iterable[Iterable[torch.Tensor]]) -> None:
    """Run the work whose results are not used."""
    for parts in results:
        for _ in parts:
            pass


def _of_hidden(
    run: Callable[[Gathered, torch.Tensor], Iterable[Iterable[torch.Tensor]]], size: int
) -> Callable[[Gathered, torch.Tensor], Iterable[Iterable[torch.Tensor]]]:
    """The same for what a forward with taps returns, of which the first `size` columns are hidden states."""
    return lambda batch, hidden: run(batch, hidden[:, :size])


# EncoderBatch: the inputs of a step of whole prompts. The host knows all token ids, so the device gathers nothing.


class EncoderBatch:
    keeps_rows = False

    def __init__(
        self,
        device: Device,
        *,
        with_types: bool,
        with_unseen: bool = False,
        short_rope: tuple[int, int] | None = None,
    ) -> None:
        """`with_types`: the model has token types. `with_unseen`: its queries have tokens that no token attends to.
        Then types and counts are uploaded in every step, so that one captured graph fits every step of a size.
        `short_rope`: the longest prompt that uses LongRoPE's short factors, and their first row in the rope table."""
        self.with_types = with_types
        self.short_rope = short_rope
        self.with_unseen = with_unseen
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=device.torch_device)

    def expand(self, plan: StepPlan) -> StepPlan:
        return plan

    def prepare(self, plan: StepPlan, upload: Upload, size: Size | None = None) -> Callable[[], Gathered]:
        counts, pool_plan = plan.num_tokens, plan.pooling or NO_POOLING
        num_rows, total = len(counts), len(plan.tokens)
        tokens, rows = (total, num_rows) if size is None else (size.tokens, size.rows)
        # padding tokens have id 0 at position 0, and padding rows have no tokens
        # ids, positions, types, rows of the rope table
        num_fields = 2 + self.with_types + (self.short_rope is not None)
        token_span, by_token = upload.room(np.int64, (num_fields, tokens))
        by_token[:, total:] = 0
        ends = np.cumsum(counts, dtype=np.int32)
        starts = np.full(rows + 1, total, np.int32)
        starts[0] = 0
        starts[1 : num_rows + 1] = ends
        begins = plan.lengths - counts  # the position of each row's first token: 0
        positions = by_token[1, :total]
        np.subtract(np.arange(total), np.repeat(ends - counts - begins, counts), out=positions)
        by_token[0, :total] = plan.tokens
        if self.with_types and pool_plan.type_starts is None:
            by_token[2, :total] = 0
        elif pool_plan.type_starts is not None:
            assert self.with_types, "the plan has token types, the model has none"
            np.greater_equal(positions, np.repeat(pool_plan.type_starts, counts), out=by_token[2, :total])
        if self.short_rope is not None:
            longest, first_row = self.short_rope
            by_token[-1, :total] = positions + np.repeat(np.where(plan.lengths > longest, 0, first_row), counts)
        lengths = np.zeros(rows, np.int64)
        lengths[:num_rows] = plan.lengths
        spans = token_span, upload.put(lengths), upload.put(starts)
        assert pool_plan.num_seen is None or self.with_unseen, "the plan hides tokens, the model attends to all"
        seen_span = None
        if self.with_unseen:
            seen = np.zeros(rows, np.int32)
            seen[:num_rows] = plan.lengths if pool_plan.num_seen is None else pool_plan.num_seen
            seen_span = upload.put(seen)
        assert size is None or spans[0].start == 0, "a padded batch comes first"

        def view() -> Gathered:
            tokens, lengths, starts = (upload.tensor(span) for span in spans)
            return Gathered(
                BatchView(
                    ids=tokens[0],
                    positions=tokens[1],
                    lengths=lengths,
                    slots=(),
                    page_tables=(),
                    num_tokens=counts,
                    max_lengths=plan.lengths,
                    num_single=0,
                    query_starts=starts,
                    token_types=tokens[2] if self.with_types else None,
                    rope_rows=None if self.short_rope is None else tokens[-1],
                    num_seen=None if seen_span is None else upload.tensor(seen_span),
                    host_seen=pool_plan.num_seen,
                ),
                self._no_rows,
            )

        return view

    def advance(self, batch: Gathered) -> None:
        """No state lasts longer than the step."""
