"""TokenVectors: one vector or score per token of a prompt, the token weights of a prompt, and late interaction.

Tokens of a prompt that takes several steps are kept until it ends (`chunk_state.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np
import torch

from slipstream.config.buffer_size import TOKENS_AT_ONCE
from slipstream.nn.models.pooling_heads import Heads
from slipstream.runner.batch.staging import Upload
from slipstream.runner.pooling.activations import finish
from slipstream.runner.pooling.chunk_state import ChunkState
from slipstream.runner.pooling.late_interaction import QueryStore
from slipstream.runner.pooling.methods import TakeHidden
from slipstream.runner.pooling.pool_mode import PoolMode
from slipstream.runner.pooling.pooled_rows import PooledRow, by_mode, take_tokens
from slipstream.runner.pooling.results import ResultBlock

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
