"""PlanBuilder: gathers one step's decisions in Python lists and turns them into arrays once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from slipstream.pooling_params import PoolingParams
from slipstream.request import Request
from slipstream.scheduler.cache.kind import Run
from slipstream.step import (
    NO_INTS,
    NO_PAGES,
    Admission,
    Ints,
    PageUpdates,
    PoolAdmission,
    PoolPlan,
    PromptScores,
    StepPlan,
)

_NO_COPIES: Ints = np.zeros((0, 3), np.int32)


class Chunk(NamedTuple):
    """Positions whose tokens the host knows; or, if it is drafted, a token that the device drew and drafts of it."""

    request: Request
    start: int
    num_tokens: int
    num_drawn: int
    pools: bool = False  # its last, and their request wants hidden states
    first_scored: int = 0  # prompt tokens whose logprobs are asked for: from this one on
    num_scored: int = 0
    is_drafted: bool = False

    @property
    def num_given(self) -> int:
        return 0 if self.is_drafted else self.num_tokens


class PlanBuilder:
    """A plan in the making.

    Rows are of two kinds. A decode computes one position, whose token only the device knows, and samples. A chunk
    computes positions whose tokens are given, and samples or pools if they are its last; or a drawn token and drafts.
    The plan's order is decodes, chunks of one token, drafted rows, longer chunks; among equals the order in which they
    were added.
    """

    def __init__(self, step: int, num_groups: int) -> None:
        self.step = step
        self.decodes: list[Request] = []
        self.chunks: list[Chunk] = []
        self.admitted: list[Admission] = []
        self.pool_admitted: list[PoolAdmission] = []
        self.copies: list[tuple[int, int, int]] = []
        self._num_scored = 0
        self._widest = 0  # of what is reported of scored tokens
        self._updates: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(num_groups)]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def admit(self, request: Request) -> None:
        """A request that was just seated, and has computed nothing but what it found in the cache."""
        if request.pooling is not None:
            self.pool_admitted.append(
                PoolAdmission(
                    request.row,
                    request.admission,
                    request.num_prompt,
                    request.computed,
                    request.pooling,
                    request.long_rope,
                )
            )
            return
        params = request.params
        self.admitted.append(
            Admission(
                row=request.row,
                number=request.admission,
                num_prompt_tokens=request.num_prompt,
                num_known=request.num_known,
                num_cached=request.computed,
                params=params,
                seed=request.seed,
                sample=request.sample,
                stop_ids=tuple(request.stop_ids) if params.min_tokens > 0 else (),
                history=np.array(request.tokens, np.int32) if params.needs_history else None,
                bad_words=request.bad_words,
                long_rope=request.long_rope,
            )
        )

    def change_pages(self, row: int, changed: list[Run]) -> None:
        for group, start, new in changed:
            rows, places, pages = self._updates[group]
            for place, page in enumerate(new, start):
                rows.append(row)
                places.append(place)
                pages.append(page)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if chunk.num_scored:
            self._num_scored += chunk.num_scored
            self._widest = max(self._widest, _score_width(chunk.request))

    def score_room(self, request: Request, most: int) -> int:
        """How many prompt tokens of this request the step may still score: lines of all are as long as the longest, and
        have `most` numbers together."""
        return most // max(self._widest, _score_width(request)) - self._num_scored

    def sort(self) -> list[Request]:
        """Bring the rows into the plan's order; returns those that sample."""
        if not self.chunks:
            return self.decodes
        self.chunks.sort(key=lambda chunk: 0 if chunk.num_tokens == 1 else 1 if chunk.is_drafted else 2)
        return self.decodes + [chunk.request for chunk in self.chunks if chunk.num_drawn]

    def drawn(self) -> list[int] | None:
        """How many tokens each of those draws; None: one."""
        if not any(chunk.num_drawn > 1 for chunk in self.chunks):
            return None
        return [1] * len(self.decodes) + [chunk.num_drawn for chunk in self.chunks if chunk.num_drawn]

    def pooled(self) -> list[Request]:
        """Those whose pooled result leaves with this step; rows must be in order."""
        return [chunk.request for chunk in self.chunks if chunk.pools]

    def build(
        self,
        released: list[int],
        num_logprobs: int | None,
        arrays: DecodeArrays,
        pooling: PoolPlan | None = None,
    ) -> StepPlan:
        """The plan. Rows must be in order, `arrays` those of the previous plan, `pooling` what `pool_plan` returned."""
        chunks, num_decodes = self.chunks, len(self.decodes)
        total = num_decodes + len(chunks)
        arrays.advance(self.decodes)
        rows, lengths = arrays.rows, arrays.lengths
        num_tokens, num_given, num_drawn = _all_decode(num_decodes)
        tokens = NO_INTS
        if chunks:
            num_tokens = np.ones(total, np.int32)
            num_given = np.zeros(total, np.int32)
            num_drawn = np.ones(total, np.int32)
            rows = np.concatenate([rows, np.array([chunk.request.row for chunk in chunks], np.int32)])
            lengths = np.concatenate([lengths, np.array([chunk.request.computed for chunk in chunks], np.int32)])
            num_tokens[num_decodes:] = [chunk.num_tokens for chunk in chunks]
            num_given[num_decodes:] = [chunk.num_given for chunk in chunks]
            num_drawn[num_decodes:] = [chunk.num_drawn for chunk in chunks]
            given: list[int] = []
            for chunk in chunks:
                if not chunk.is_drafted:
                    given += chunk.request.tokens[chunk.start : chunk.start + chunk.num_tokens]
            tokens = np.array(given, np.int32)
        return StepPlan(
            step=self.step,
            released=_ints(released),
            admitted=tuple(self.admitted),
            rows=rows,
            num_tokens=num_tokens,
            lengths=lengths,
            num_drawn=num_drawn,
            num_given=num_given,
            tokens=tokens,
            new_pages=tuple(
                PageUpdates(_ints(rows), _ints(places), _ints(pages)) if pages else NO_PAGES
                for rows, places, pages in self._updates
            ),
            copies=np.array(self.copies, np.int32) if self.copies else _NO_COPIES,
            num_logprobs=num_logprobs,
            scores=self._scores() if chunks else None,
            pooling=pooling,
        )

    def pool_plan(
        self, params: list[PoolingParams], queries: Ints | None, freed_queries: tuple[int, ...]
    ) -> PoolPlan | None:
        """The pooling part of the plan; rows must be in order. `params` and `queries` of the prompts that end."""
        if not (params or freed_queries or self.pool_admitted):
            return None
        ends = None
        if params:
            num_decodes = len(self.decodes)
            ends = np.zeros(num_decodes + len(self.chunks), np.bool_)
            ends[num_decodes:] = [chunk.pools for chunk in self.chunks]
        return PoolPlan(tuple(self.pool_admitted), ends, tuple(params), queries, freed_queries)

    def unsampled(self) -> list[tuple[Request, int, int]]:
        """Those that compute and do not sample: nobody would tell when their positions are done."""
        requests = [chunk.request for chunk in self.chunks if not chunk.num_drawn]
        return [(request, request.admission, request.computed) for request in requests]

    def scored(self) -> list[tuple[Request, int, int]]:
        """Whose prompts are scored, from which token on and how many; rows must be in order."""
        return [(chunk.request, chunk.first_scored, chunk.num_scored) for chunk in self.chunks if chunk.num_scored]

    def _scores(self) -> PromptScores | None:
        places: list[int] = []
        tokens: list[int] = []
        num_logprobs = 0
        offset = len(self.decodes)  # of the chunk's tokens among all tokens of the step
        for chunk in self.chunks:
            if chunk.num_scored:
                first = chunk.first_scored
                place = offset + first - 1 - chunk.start
                places += range(place, place + chunk.num_scored)
                tokens += chunk.request.tokens[first : first + chunk.num_scored]
                num_logprobs = max(num_logprobs, chunk.request.params.prompt_logprobs or 0)
            offset += chunk.num_tokens
        return PromptScores(_ints(places), _ints(tokens), num_logprobs) if places else None


class DecodeArrays:
    """Rows and lengths of a plan's decodes. Mostly the next plan decodes the same requests, each one longer."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows: Ints = NO_INTS
        self.lengths: Ints = NO_INTS
        self.is_stale = False  # a commit took rejected drafts off the length of a request

    def advance(self, requests: list[Request]) -> None:
        """From one plan to the next. To leave its row and come back, a request needs a plan in between without it."""
        if requests == self.requests and not self.is_stale:
            self.lengths = self.lengths + 1
        else:
            self.requests = requests
            self.rows = np.array([request.row for request in requests], np.int32)
            self.lengths = np.array([request.computed for request in requests], np.int32)
            self.is_stale = False


def _score_width(request: Request) -> int:
    """A prompt token's own logprob and those of the likeliest."""
    return 1 + (request.params.prompt_logprobs or 0)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32) if values else NO_INTS


@lru_cache(1024)
def _all_decode(count: int) -> tuple[Ints, Ints, Ints]:
    """What a plan of decodes alone says of each: one position, no token given, a token drawn. Nobody changes them."""
    ones = np.ones(count, np.int32)
    return ones, np.zeros(count, np.int32), ones
