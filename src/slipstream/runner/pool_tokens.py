"""TokenVectors: one vector or score per token of a prompt, the token weights of a prompt, and late interaction.

Tokens of a prompt that takes several steps are kept until it ends (ChunkState).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from slipstream.checkpoint.pooling_info import Method, Reduction, reductions_of
from slipstream.config.buffer_size import MAX_SCORES, TOKENS_AT_ONCE
from slipstream.contracts.step import PoolAdmission, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import BatchView
from slipstream.nn.pooling_heads import Heads
from slipstream.runner.pool_methods import (
    PoolMode,
    TakeHidden,
    begins_of,
    combine,
    finish,
    finish_vectors,
    reduce_rows,
    starts_of,
)
from slipstream.runner.pool_results import PooledRow, ResultBlock, by_mode, skipped_in_step, take_tokens
from slipstream.runner.staging import Upload

Job = Callable[[torch.Tensor], Iterable[torch.Tensor]]
"""Device: from a step's hidden states to the vectors of one block of results, in several parts to limit memory."""


class TokenVectors:
    def __init__(self, heads: Heads | None, chunks: ChunkState, dtype: torch.dtype) -> None:
        """Without heads a token's vector is its hidden state, as `dtype`."""
        self.heads = heads
        self.chunks = chunks
        self.dtype = dtype
        self.queries = QueryStore()
        self._query_sizes: dict[int, int] = {}  # by number: tokens of stored queries

    def free_queries(self, queries: tuple[int, ...]) -> Callable[[], None]:
        """Host: no request needs these stored queries any more. Returns the device work that frees them."""
        for number in queries:
            self._query_sizes.pop(number, None)
        return functools.partial(self.queries.free, queries)

    def prepare(self, rows: list[PooledRow], upload: Upload) -> tuple[list[TakeHidden], list[ResultBlock], list[Job]]:
        """Host: the work for prompts that continue, and the blocks of results of those that end, with their work."""
        groups = by_mode([m for m in rows if m.mode.task not in ("embed", "classify")])
        before: list[TakeHidden] = []
        blocks: list[ResultBlock] = []
        jobs: list[Job] = []
        for mode, group in groups.items():  # a document is never in the same step as its query
            pieces: list[TakeHidden] = []
            counts: list[int] = []
            for in_one_step, run in groupby(group, key=lambda row: row.ends and not row.has_begun):
                if in_one_step:
                    whole = list(run)
                    pieces.append(take_tokens(whole, upload))
                    counts += [row.num_picked for row in whole]
                    continue
                for row in run:
                    part, count = self.chunks.part_of(row.row), row.num_picked
                    add = part.prepare(count, take_tokens([row], upload) if count else None)
                    if row.ends:
                        pieces.append(add)
                        counts.append(part.count)
                    else:
                        before.append(add)
            if counts:
                ending = [row for row in group if row.ends]
                blocks.append(self._block(mode, ending, counts))
                jobs.append(self._job(mode, ending, counts, pieces, upload))
        return before, blocks, jobs

    def _block(self, mode: PoolMode, ending: list[PooledRow], counts: list[int]) -> ResultBlock:
        indices = [row.result for row in ending]
        if mode.late == "query":
            return ResultBlock(0, indices, None, len(ending))
        if mode.late == "document":
            return ResultBlock(1, indices, None, len(ending))
        if mode.kind == "vectors":  # a weight for each token of the vocabulary
            return ResultBlock(mode.width, indices, None, len(ending))
        return ResultBlock(mode.width, indices, counts, sum(counts))

    def _job(
        self, mode: PoolMode, ending: list[PooledRow], counts: list[int], pieces: list[TakeHidden], upload: Upload
    ) -> Job:
        starts = None
        if mode.task == "sparse":
            starts = upload.put(np.cumsum([0, *counts], dtype=np.int32))
        query_numbers = [row.query for row in ending]
        score = None
        if mode.late == "query":
            self._query_sizes.update(zip(query_numbers, counts, strict=True))
        elif mode.late == "document":
            sizes = [self._query_sizes[number] for number in query_numbers]
            score = self.queries.prepare_scores(counts, query_numbers, sizes, mode.width, upload)

        def job(hidden: torch.Tensor) -> Iterable[torch.Tensor]:
            if starts is not None:
                assert self.heads is not None, "a model without heads gives words no weights"
                return [self.heads.sparse(_joined([piece(hidden) for piece in pieces]), upload.tensor(starts))]
            parts = (
                finish(self._vectors(some, mode), mode)
                for piece in pieces
                for some in piece(hidden).split(TOKENS_AT_ONCE)
            )
            if not mode.late:
                return parts
            vectors = _joined(list(parts))
            if score is not None:
                return [score(vectors)]
            self.queries.keep(vectors, counts, query_numbers)
            return []

        return job

    def _vectors(self, tokens: torch.Tensor, mode: PoolMode) -> torch.Tensor:
        """Device: from hidden states to one vector per token."""
        if self.heads is None:
            return tokens.to(self.dtype)
        return self.heads.token_embed(tokens) if mode.task == "token_embed" else self.heads.token_classify(tokens)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# Late interaction (MaxSim): stores query token vectors on the device and scores documents against them there.
#
# The scheduler counts the documents that still need a query and decides when it is freed.


class QueryStore:
    """Token vectors of queries by number. Only device work accesses them."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}  # [tokens, size]

    def __len__(self) -> int:
        return len(self._kept)

    def free(self, numbers: tuple[int, ...]) -> None:
        """Device: free queries. A query that was aborted before it ran is not stored, and is ignored."""
        for number in numbers:
            self._kept.pop(number, None)

    def keep(self, vectors: torch.Tensor, counts: Sequence[int], numbers: Sequence[int]) -> None:
        """Device: store the token vectors of some queries. A copy, because the step's memory is reused."""
        for number, own in zip(numbers, vectors.split(list(counts)), strict=True):
            self._kept[number] = own.clone()

    def prepare_scores(
        self, counts: Sequence[int], numbers: Sequence[int], query_sizes: Sequence[int], width: int, upload: Upload
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Host: for documents with these token counts, and the numbers and token counts of their queries. The returned
        work computes scores [documents, 1] from token vectors [T, width]."""
        starts = np.cumsum([0, *counts])
        longest, of_query = max(counts), max(query_sizes)
        max_documents = max(1, MAX_SCORES // max(1, longest * of_query, max(longest, of_query) * width))
        parts, indices = [], []
        for first in range(0, len(counts), max_documents):
            index_of = {number: i for i, number in enumerate(dict.fromkeys(numbers[first : first + max_documents]))}
            indices += [index_of[number] for number in numbers[first : first + max_documents]]
            parts.append((first, list(index_of), max(1, *counts[first : first + max_documents])))
        # a document without pooled tokens scores 0
        of_queries = [size if count else 0 for size, count in zip(query_sizes, counts, strict=True)]
        span = upload.put(np.array([indices, starts[:-1], counts, of_queries], np.int64))

        def score(vectors: torch.Tensor) -> torch.Tensor:
            if not len(vectors):
                return vectors.new_zeros(len(counts), 1)
            scores = []
            for first, own, max_num_tokens in parts:
                which, begins, num_tokens, num_query = upload.tensor(span)[:, first : first + max_documents].unsqueeze(
                    2
                )
                offset = torch.arange(max_num_tokens, device=vectors.device)
                if max_documents == 1:  # a single pair may exceed the limit
                    documents = vectors[min(starts[first], len(vectors) - 1) :][:max_num_tokens].unsqueeze(0)
                else:
                    index = (begins + offset).clamp_(max=len(vectors) - 1)  # vectors past a document's end are masked
                    documents = vectors.index_select(0, index.flatten()).unflatten(0, index.shape)
                queries = pad_sequence([self._kept[number] for number in own], batch_first=True)
                queries, none = queries.index_select(0, which.flatten()), (offset >= num_tokens).unsqueeze(1)
                # [documents, query tokens, document tokens]; split by query tokens if a single pair is too large
                products = (
                    (some @ documents.transpose(1, 2)).masked_fill_(none, -torch.inf).amax(2)
                    for some in queries.split(max(1, MAX_SCORES // (len(which) * max_num_tokens)), dim=1)
                )
                best = torch.cat(list(products), 1)
                unused = torch.arange(best.shape[1], device=vectors.device) >= num_query
                scores.append(best.masked_fill_(unused, 0).sum(1, keepdim=True))
            return scores[0] if len(scores) == 1 else torch.cat(scores)

        return score


# ChunkState: what is kept between the steps of a prompt that is computed in several chunks.
#
# LAST needs nothing. FIRST keeps one hidden state, MEAN a running sum, the weighted mean a weighted sum, MAX a running
# maximum: one buffer of each kind, with a vector per row. Results of all tokens keep their hidden states, in a buffer
# of the prompt's size. A prompt that is computed in one step keeps nothing.

PoolWork = Callable[[BatchView, torch.Tensor], torch.Tensor]


class TokenParts:
    """Hidden states of a prompt's tokens so far. Only device work accesses the tensor."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.count = 0  # host: number of tokens after all launched steps
        self._hidden: torch.Tensor | None = None

    def prepare(self, count: int, take: TakeHidden | None) -> TakeHidden:
        """Host: add `count` tokens of this step. The returned work appends their hidden states and returns all."""
        start, stop = self.count, self.count + count
        self.count = stop

        def add(hidden: torch.Tensor) -> torch.Tensor:
            if self._hidden is None:
                self._hidden = hidden.new_empty(self.max_tokens, hidden.shape[1])
            if take is not None:
                self._hidden[start:stop].copy_(take(hidden))
            return self._hidden[:stop]

        return add


class ChunkState:
    """State per row: admissions add rows, releases remove them."""

    def __init__(
        self, methods: tuple[Method, ...], num_rows: int, hidden_size: int, dtype: torch.dtype, device: Device
    ) -> None:
        self.methods = methods
        self.admissions: dict[int, PoolAdmission] = {}  # by row: running pooling requests
        self.parts: dict[int, TokenParts] = {}  # by row: prompts in several steps that need all tokens
        dtype = torch.promote_types(dtype, torch.float32)
        # [rows, hidden] each: the reduction of the row's tokens so far
        self.reduced: dict[Reduction, torch.Tensor] = {
            kind: torch.zeros(num_rows, hidden_size, dtype=dtype, device=device.torch_device)
            for kind in reductions_of(methods)
        }

    def apply(self, plan: StepPlan) -> None:
        if self.admissions:
            for row in plan.released.tolist():
                self.admissions.pop(row, None)
                self.parts.pop(row, None)
        if plan.pooling is not None:
            self.admissions.update({admission.row: admission for admission in plan.pooling.admitted})

    def part_of(self, row: int) -> TokenParts:
        """Host: the parts of a prompt that does not end with this step, or began before it."""
        if row not in self.parts:
            self.parts[row] = TokenParts(self.admissions[row].num_prompt_tokens)
        return self.parts[row]

    def flush(self, upload: Upload) -> None:
        """Nothing to upload: each step uploads what it needs when it is prepared."""

    def pool_vectors(self, rows: Sequence[PooledRow], upload: Upload) -> PoolWork:
        """Host: pool rows of which some began before this step or continue after it. The returned work computes a
        vector for each prompt that ends."""
        ending = [row for row in rows if row.ends]
        first = [self._first_of(row) for row in rows]
        indices_rows = [[m.index for m in rows], [m.row for m in rows]]
        values = upload.put(np.array([*indices_rows, np.maximum(first, 0)], np.int64))
        flags = upload.put(np.array([[m.has_begun for m in rows], [at >= 0 for at in first]], np.bool_))
        last = upload.put(np.flatnonzero([row.ends for row in rows]))
        ends = upload.put(np.array([m.start + len(m.tokens) - 1 for m in ending], np.int64))
        skips_now = skipped_in_step(rows, upload)
        skips = None
        if any(row.mode.skip for row in ending):
            skips = upload.put(np.array([row.mode.skip for row in ending], np.int64))
        methods, reduced = self.methods, self.reduced

        def pool(view: BatchView, hidden: torch.Tensor) -> torch.Tensor:
            indices, rows, firsts = upload.tensor(values).unbind(0)
            began, has_first = upload.tensor(flags).unsqueeze(2).unbind(0)
            starts = starts_of(view, hidden)
            begins = None if skips_now is None else begins_of(starts, upload.tensor(skips_now))
            whole: dict[Reduction, torch.Tensor] = {}
            for kind, table in reduced.items():
                before = table.index_select(0, rows)
                if kind == "first":
                    now = torch.where(has_first, hidden.index_select(0, firsts).to(table.dtype), before)
                else:
                    now = reduce_rows(kind, view, hidden, starts, begins).index_select(0, indices)
                    now = torch.where(began, combine(kind, before, now), now)
                table.index_copy_(0, rows, now)
                whole[kind] = now.index_select(0, upload.tensor(last))
            of_last = hidden.index_select(0, upload.tensor(ends)) if "last" in methods else None
            lengths = view.lengths.index_select(0, indices.index_select(0, upload.tensor(last)))
            return finish_vectors(methods, whole, of_last, lengths, None if skips is None else upload.tensor(skips))

        return pool

    def _first_of(self, row: PooledRow) -> int:
        """Index in the step of the prompt's first pooled token; -1: it is in another step. If all tokens are skipped,
        the first token."""
        skip, begin = row.mode.skip, row.length - len(row.tokens)
        length = row.length if row.ends else self.admissions[row.row].num_prompt_tokens
        position = skip if skip < length else 0
        return row.start + position - begin if begin <= position < row.length else -1
