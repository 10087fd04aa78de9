"""PoolHead: hidden states to vectors, scores and weights, of those rows whose prompt is computed with this step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby

import numpy as np
import torch

from slipstream.config.memory import TOKENS_AT_ONCE
from slipstream.config.pooling_info import PoolingInfo
from slipstream.nn.context import BatchView
from slipstream.nn.models.pooling_heads import Heads
from slipstream.pooling_params import PoolingParams
from slipstream.runner.batch.input_batch import Gathered, Size
from slipstream.runner.batch.staging import Upload
from slipstream.runner.graphs import GraphPool
from slipstream.runner.head import Head
from slipstream.runner.pooling.activations import finish
from slipstream.runner.pooling.chunk_state import ChunkState, Pooled
from slipstream.runner.pooling.late_interaction import QueryStore
from slipstream.runner.pooling.methods import Lines, pool_all, take_lines
from slipstream.runner.pooling.pool_mode import PoolMode, Settings
from slipstream.runner.pooling.pooled_rows import PooledRow, by_mode, skipped_in_step, take_tokens
from slipstream.runner.pooling.results import Block, PoolHandle
from slipstream.runner.results import ResultRing
from slipstream.step import NO_POOLING, PoolPlan, StepPlan

Job = Callable[[torch.Tensor], Iterable[torch.Tensor]]
"""Device: a step's hidden states to the lines of one block of results, some after others, so that few are made at
once."""
Vectors = Callable[[BatchView, torch.Tensor], list[torch.Tensor]]
"""Likewise, to those of several blocks."""


class PoolHead:
    """Also a `RowState`: of prompts that take several steps it keeps what they leave behind."""

    def __init__(
        self,
        heads: Heads | None,
        info: PoolingInfo,
        vocab_size: int,
        carry: ChunkState,
        results: ResultRing,
        graphs: GraphPool,
        dtype: torch.dtype,
    ) -> None:
        """Without heads a vector is a hidden state. `dtype` is that of results."""
        self.heads = heads
        self.methods = info.methods
        self.settings = Settings(info, None if heads is None else heads.sparse_by, vocab_size)
        self.carry = carry
        self.queries = QueryStore()
        self.results = results
        self.graphs = graphs
        self.dtype = dtype
        self._numpy_dtype = np.dtype(np.float64 if dtype is torch.float64 else np.float32)
        self._query_sizes: dict[int, int] = {}  # of kept queries
        self._freed: tuple[int, ...] = ()

    def apply(self, plan: StepPlan) -> None:
        self.carry.apply(plan)
        self._freed = () if plan.pooling is None else plan.pooling.freed_queries

    def flush(self, upload: Upload) -> None:
        if self._freed:
            upload.then(self.free_queries(self._freed))

    def free_queries(self, numbers: tuple[int, ...]) -> Callable[[], None]:
        """Host: no request needs these stored queries any more. Returns the device work that frees them."""
        for number in numbers:
            self._query_sizes.pop(number, None)
        return functools.partial(self.queries.free, numbers)

    def wants_all(self, plan: StepPlan) -> bool:
        pooling = plan.pooling or NO_POOLING
        if pooling.ends is None and not self.carry.admissions:
            return False
        if self.methods != ("last",):
            return True
        params = pooling.params
        if len(params) < len(plan.rows):  # others may go on
            params += tuple(admission.params for admission in self.carry.admissions.values())
        return any(self.settings.of(own).task not in ("embed", "classify") for own in _distinct(params))

    def prepare(
        self, plan: StepPlan, upload: Upload, size: Size | None = None, *, only_last: bool = False
    ) -> Head | None:
        """Host: stage what the step's rows need; None when it has no row that pools, now or later."""
        pooling = plan.pooling or NO_POOLING
        if pooling.ends is None and not self.carry.admissions:
            return None
        if len(pooling.params) == len(plan.rows):  # every prompt ends
            setting, *others = {self.settings.of(params) for params in _distinct(pooling.params)}
            in_one_step = self.methods == ("last",) or np.array_equal(plan.lengths, plan.num_tokens)
            # how many tokens do not count is staged
            if not others and setting.task in ("embed", "classify") and in_one_step and not setting.skip:
                return self._prepare_alike(len(plan.rows), setting, size, only_last)
        members = self._members(plan, pooling)
        if not members:
            return None
        before, blocks, jobs = self._prepare_tokens(members, upload)
        vector_blocks, vectors = self._prepare_vectors(members, upload, only_last)
        blocks += vector_blocks

        def run(batch: Gathered, hidden: torch.Tensor) -> Iterator[Iterable[torch.Tensor]]:
            for work in before:
                work(hidden)
            for job in jobs:
                yield job(hidden)
            if vectors is not None:
                yield from ([lines] for lines in vectors(batch.view, hidden))

        return self._head(blocks, run)

    def _prepare_alike(self, count: int, setting: PoolMode, size: Size | None, only_last: bool) -> Head:
        """Host: every row of the step ends with it, and all want the same. Nothing need be staged."""
        # lines may be cut to as many widths as they have numbers: a graph for each would leave no room for others
        common = setting if setting.cut is None else setting._replace(width=0, cut=None, finish="identity")

        def work(batch: Gathered, hidden: torch.Tensor) -> torch.Tensor:
            return self._finish(hidden if only_last else pool_all(self.methods, batch.view, hidden), common)

        def run(batch: Gathered, hidden: torch.Tensor) -> list[Iterable[torch.Tensor]]:
            if size is None:
                lines = work(batch, hidden)
            else:
                key = ("pool", size, only_last, common)
                lines = self.graphs.run(key, lambda: self.graphs.results.put(work(batch, hidden)))[:count]
            return [[lines if common is setting else finish(lines, setting)]]

        return self._head([Block(setting.width, None, None, count)], run)

    def _head(
        self, blocks: list[Block], run: Callable[[Gathered, torch.Tensor], Iterable[Iterable[torch.Tensor]]]
    ) -> Head:
        shape = Block.lay_out(blocks, self._numpy_dtype)
        if not shape.num_bytes:  # nobody ends, or nothing of theirs is copied
            nothing = np.zeros(0, np.uint8)
            leave = (lambda sent: PoolHandle(sent.copied, shape, nothing, blocks)) if blocks else None
            return Head(lambda batch, hidden: _drop(run(batch, hidden)), leave)
        slot = self.results.open(shape)

        def write(batch: Gathered, hidden: torch.Tensor) -> None:
            for place, (block, parts) in enumerate(zip(blocks, run(batch, hidden), strict=True)):
                first = 0
                for lines in parts:
                    for name, values in block.name(place, lines.to(self.dtype)).items():
                        slot.write_part(name, first, values)
                    first += len(lines)

        return Head(write, lambda sent: PoolHandle(sent.copied, shape, slot.find(sent), blocks))

    def _settings(self, pooling: PoolPlan) -> list[PoolMode]:
        """One for each prompt that ends."""
        known = {id(params): self.settings.of(params) for params in _distinct(pooling.params)}
        return [known[id(params)] for params in pooling.params]

    def _members(self, plan: StepPlan, pooling: PoolPlan) -> list[PooledRow]:
        ending = np.zeros(len(plan.rows), np.bool_) if pooling.ends is None else pooling.ends
        ends = np.cumsum(plan.num_tokens)
        given = np.cumsum(plan.num_given) - plan.num_given
        settings = iter(self._settings(pooling))
        queries = iter([-1] * len(pooling.params) if pooling.queries is None else pooling.queries.tolist())
        admissions = self.carry.admissions
        members: list[PooledRow] = []
        num_ending = 0
        for place, (row, count, length) in enumerate(
            zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.lengths.tolist(), strict=True)
        ):
            if not ending[place] and row not in admissions:
                continue  # it generates
            start = int(ends[place]) - count
            tokens = plan.tokens[given[place] : given[place] + count]
            if ending[place]:
                member = PooledRow(place, row, start, tokens, length, next(settings), next(queries), num_ending)
                num_ending += 1
            else:
                setting = self.settings.of(admissions[row].params)
                member = PooledRow(place, row, start, tokens, length, setting, -1, -1)
            members.append(member)
        return members

    # Results with a line for each prompt

    def _prepare_vectors(
        self, members: list[PooledRow], upload: Upload, only_last: bool
    ) -> tuple[list[Block], Vectors | None]:
        """One line for each prompt that ends, by the model's method; then what each setting makes of its lines."""
        mine = [member for member in members if member.setting.task in ("embed", "classify")]
        ending = [member for member in mine if member.ends]
        lines: Pooled
        if self.carry.kept and any(not m.ends or m.has_begun for m in mine):
            lines = self.carry.pool_lines(mine, upload)
        elif not ending:
            return [], None
        else:
            lines = self._whole_lines(ending, upload, only_last)

        groups = by_mode(ending)
        blocks = [Block(own.width, [m.result for m in group], None, len(group)) for own, group in groups.items()]
        where = {member.place: i for i, member in enumerate(ending)}
        picks = {
            own: take_lines(np.array([where[m.place] for m in group], np.int64), upload)
            for own, group in groups.items()
            if len(groups) > 1
        }

        def vectors(view: BatchView, hidden: torch.Tensor) -> list[torch.Tensor]:
            pooled = lines(view, hidden)
            return [self._finish(picks[own](pooled) if own in picks else pooled, own) for own in groups]

        return blocks, vectors

    def _whole_lines(self, ending: list[PooledRow], upload: Upload, only_last: bool) -> Pooled:
        """Host: a line for each of these, whose prompts are in the step whole or need their last token alone."""
        take = take_lines(np.array([m.place for m in ending], np.int64), upload)
        counts_none = [member.setting.skip >= member.length for member in ending]
        none = upload.put(np.array(counts_none, np.bool_)) if any(counts_none) else None
        skipped = None if self.methods == ("last",) else skipped_in_step(ending, upload)

        def lines(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
            if only_last:
                pooled = take(hidden)
            else:
                skips = None if skipped is None else upload.tensor(skipped)
                pooled = take(pool_all(self.methods, view, hidden, skips))
            if none is None or self.methods != ("last",):
                return pooled
            return torch.where(upload.tensor(none).unsqueeze(1), 0, pooled)

        return lines

    def _finish(self, pooled: torch.Tensor, setting: PoolMode) -> torch.Tensor:
        """Device: pooled hidden states to results."""
        if setting.task == "classify":
            assert self.heads is not None, "a model without heads has no classes"
            return finish(self.heads.classify(pooled), setting)
        return finish(pooled.to(self.dtype) if self.heads is None else self.heads.embed(pooled), setting)

    # Results made of tokens

    def _prepare_tokens(self, members: list[PooledRow], upload: Upload) -> tuple[list[Lines], list[Block], list[Job]]:
        """What must be done for prompts that go on, and the blocks of those that end."""
        groups = by_mode([m for m in members if m.setting.task not in ("embed", "classify")])
        before: list[Lines] = []
        blocks: list[Block] = []
        jobs: list[Job] = []
        for setting, group in groups.items():  # no document is in a step with its query
            pieces: list[Lines] = []
            counts: list[int] = []
            for in_one_step, run in groupby(group, key=lambda member: member.ends and not member.has_begun):
                if in_one_step:
                    whole = list(run)
                    pieces.append(take_tokens(whole, upload))
                    counts += [member.num_picked for member in whole]
                    continue
                for member in run:
                    part, count = self.carry.part_of(member.row), member.num_picked
                    add = part.prepare(count, take_tokens([member], upload) if count else None)
                    if member.ends:
                        pieces.append(add)
                        counts.append(part.count)
                    else:
                        before.append(add)
            if counts:
                ending = [member for member in group if member.ends]
                blocks.append(self._token_block(setting, ending, counts))
                jobs.append(self._token_job(setting, ending, counts, pieces, upload))
        return before, blocks, jobs

    def _token_block(self, setting: PoolMode, ending: list[PooledRow], counts: list[int]) -> Block:
        places = [member.result for member in ending]
        if setting.late == "query":
            return Block(0, places, None, len(ending))
        if setting.late == "document":
            return Block(1, places, None, len(ending))
        if setting.kind == "vectors":  # weights of the whole vocabulary
            return Block(setting.width, places, None, len(ending))
        return Block(setting.width, places, counts, sum(counts))

    def _token_job(
        self, setting: PoolMode, ending: list[PooledRow], counts: list[int], pieces: list[Lines], upload: Upload
    ) -> Job:
        starts = None
        if setting.task == "sparse":
            starts = upload.put(np.cumsum([0, *counts], dtype=np.int32))
        numbers = [member.query for member in ending]
        score = None
        if setting.late == "query":
            self._query_sizes.update(zip(numbers, counts, strict=True))
        elif setting.late == "document":
            sizes = [self._query_sizes[number] for number in numbers]
            score = self.queries.prepare_scores(counts, numbers, sizes, setting.width, upload)

        def job(hidden: torch.Tensor) -> Iterable[torch.Tensor]:
            if starts is not None:
                assert self.heads is not None, "a model without heads gives words no weights"
                return [self.heads.sparse(_joined([piece(hidden) for piece in pieces]), upload.tensor(starts))]
            parts = (
                finish(self._token_lines(some, setting), setting)
                for piece in pieces
                for some in piece(hidden).split(TOKENS_AT_ONCE)
            )
            if not setting.late:
                return parts
            lines = _joined(list(parts))
            if score is not None:
                return [score(lines)]
            self.queries.keep(lines, counts, numbers)
            return []

        return job

    def _token_lines(self, tokens: torch.Tensor, setting: PoolMode) -> torch.Tensor:
        """Device: hidden states to what the model makes of each."""
        if self.heads is None:
            return tokens.to(self.dtype)
        return self.heads.token_embed(tokens) if setting.task == "token_embed" else self.heads.token_classify(tokens)


def _distinct(params: tuple[PoolingParams, ...]) -> Collection[PoolingParams]:
    """Mostly all rows share one object, and whether two are one is quicker to see than whether they are equal."""
    return {id(own): own for own in params}.values()


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _drop(results: Iterable[Iterable[torch.Tensor]]) -> None:
    """Work is done for what it leaves behind, not for these."""
    for parts in results:
        for _ in parts:
            pass
