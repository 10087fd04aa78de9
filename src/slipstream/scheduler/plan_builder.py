"""PlanBuilder: collects the decisions of one step in Python lists and converts them to arrays once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from slipstream.contracts.request import Request
from slipstream.contracts.step import (
    NO_INTS,
    NO_PAGES,
    Admission,
    EmbedPlan,
    ImagePlan,
    Ints,
    PageUpdates,
    PoolAdmission,
    PoolPlan,
    Processed,
    PromptScores,
    StatePlan,
    StepPlan,
)
from slipstream.params.pooling import PoolingParams
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.cache.pages import Run
from slipstream.scheduler.cache.states import Restore, Save

_NO_COPIES: Ints = np.zeros((0, 3), np.int32)
_NO_RESTORES: Ints = np.zeros((0, 2), np.int32)


class Chunk(NamedTuple):
    """A row of known prompt tokens; or, if `is_drafted`, of the token that the device drew last and drafts after it."""

    request: Request
    start: int
    num_tokens: int
    num_drawn: int
    pools: bool = False  # whether the prompt ends with this chunk and is pooled
    first_scored: int = 0  # first prompt token whose logprob this chunk gives
    num_scored: int = 0
    is_drafted: bool = False

    @property
    def num_host_tokens(self) -> int:
        return 0 if self.is_drafted else self.num_tokens

    @property
    def following(self) -> int:
        """The token after the chunk, if the host knows it, else 0."""
        tokens, end = self.request.tokens, self.start + self.num_tokens
        return tokens[end] if not self.is_drafted and end < len(tokens) else 0


class PlanBuilder:
    """A plan under construction.

    Rows are of two kinds. A decode computes one position, whose token only the device knows, and draws a token. A chunk
    computes positions whose tokens the host knows, and draws a token or is pooled if it is the last of its prompt; or
    it is a drafted row. The plan's order is decodes, chunks of one token, drafted rows, longer chunks; within each kind
    the order in which they were added.
    """

    def __init__(self, step: int, num_groups: int, sends_history: bool = False) -> None:
        """`sends_history`: rows that do not begin at position 0 upload their tokens, for drafts."""
        self.step = step
        self.returns_drafts = False  # the result has the drafts that the plan proposes
        self.catch_up: Ints | None = None  # of a draft model that may fall behind
        self._sends_history = sends_history
        self.decodes: list[Request] = []
        self.chunks: list[Chunk] = []
        self.admitted: list[Admission] = []
        self.pool_admitted: list[PoolAdmission] = []
        self.copies: list[tuple[int, int, int]] = []
        self._num_scored = 0
        self._score_width = 0  # largest number of logprobs reported per scored token
        self._updates: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(num_groups)]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def admit(self, request: Request) -> None:
        """Add the admission of a request that has just got its row."""
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
        if params.logits_processors or params.extra_args:  # code and its arguments, which stay with the request
            params = params.with_changes(logits_processors=None, extra_args=None)
        skipped = 0 if request.embeds is None else request.num_prompt  # the token ids of an embedded prompt are unknown
        has_history = params.needs_history or (self._sends_history and request.computed)
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
                history=np.array(request.tokens[skipped:], np.int32) if has_history else None,
                is_embedded=request.embeds is not None,
                bad_words=request.bad_words,
                long_rope=request.long_rope,
                thinking=request.thinking,
                processed=Processed.NOTHING if request.processors is None else request.processors.processed,
                position_shift=0 if request.images is None else request.images.shift,
            )
        )

    def change_pages(self, row: int, changed: list[Run]) -> None:
        for group, start, new in changed:
            rows, entries, pages = self._updates[group]
            for entry, page in enumerate(new, start):
                rows.append(row)
                entries.append(entry)
                pages.append(page)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if chunk.num_scored:
            self._num_scored += chunk.num_scored
            self._score_width = max(self._score_width, _score_width(chunk.request))

    def score_room(self, request: Request, max_elements: int) -> int:
        """How many more prompt tokens of this request the step can score. All rows of the result are as wide as the
        widest, and have `max_elements` elements together."""
        return max_elements // max(self._score_width, _score_width(request)) - self._num_scored

    def sort(self) -> list[Request]:
        """Bring the rows into the plan's order. Returns the requests that draw tokens."""
        if not self.chunks:
            return self.decodes
        self.chunks.sort(key=lambda chunk: 0 if chunk.num_tokens == 1 else 1 if chunk.is_drafted else 2)
        return self.decodes + [chunk.request for chunk in self.chunks if chunk.num_drawn]

    def drawn(self) -> list[int] | None:
        """Number of tokens that each of those requests draws; None: one each."""
        if not any(chunk.num_drawn > 1 for chunk in self.chunks):
            return None
        return [1] * len(self.decodes) + [chunk.num_drawn for chunk in self.chunks if chunk.num_drawn]

    def pooled(self) -> list[Request]:
        """Requests whose prompt is pooled with this step; rows must be in order."""
        return [chunk.request for chunk in self.chunks if chunk.pools]

    def build(
        self,
        released: list[int],
        num_logprobs: int | None,
        arrays: DecodeArrays,
        cache: CacheManager,
        pooling: PoolPlan | None = None,
        num_proposed: int = 0,
        adapters: Adapters[Request] | None = None,
        images: ImagePlan | None = None,
    ) -> StepPlan:
        """The plan. Rows must be in order, `arrays` those of the previous plan, `pooling` what `pool_plan` returned;
        `cache`: has the copies of states and of pages of the second tier; `num_proposed`: drafts to propose for the
        next plan."""
        copies = cache.take_copies()
        chunks, num_decodes = self.chunks, len(self.decodes)
        total = num_decodes + len(chunks)
        arrays.advance(self.decodes)
        rows, lengths = arrays.rows, arrays.lengths
        num_tokens, num_host_tokens, num_drawn = decode_counts(num_decodes)
        tokens = following = NO_INTS
        if chunks and all(chunk.is_drafted for chunk in chunks):
            drafted = tuple([(chunk.request.row, chunk.num_tokens) for chunk in chunks])
            rows, num_tokens, num_host_tokens = arrays.with_drafted(drafted)
            num_drawn = num_tokens
            lengths = np.concatenate([lengths, np.array([chunk.request.computed for chunk in chunks], np.int32)])
        elif chunks:
            num_tokens = np.ones(total, np.int32)
            num_host_tokens = np.zeros(total, np.int32)
            num_drawn = np.ones(total, np.int32)
            rows = np.concatenate([rows, np.array([chunk.request.row for chunk in chunks], np.int32)])
            lengths = np.concatenate([lengths, np.array([chunk.request.computed for chunk in chunks], np.int32)])
            num_tokens[num_decodes:] = [chunk.num_tokens for chunk in chunks]
            num_host_tokens[num_decodes:] = [chunk.num_host_tokens for chunk in chunks]
            num_drawn[num_decodes:] = [chunk.num_drawn for chunk in chunks]
            token_ids: list[int] = []
            for chunk in chunks:
                if not chunk.is_drafted:
                    token_ids += chunk.request.tokens[chunk.start : chunk.start + chunk.num_tokens]
            tokens = np.array(token_ids, np.int32)
            following = np.zeros(total, np.int32)
            following[num_decodes:] = [chunk.following for chunk in chunks]
        return StepPlan(
            step=self.step,
            released=_ints(released),
            admitted=tuple(self.admitted),
            rows=rows,
            num_tokens=num_tokens,
            lengths=lengths,
            num_drawn=num_drawn,
            num_host_tokens=num_host_tokens,
            tokens=tokens,
            following=following,
            new_pages=tuple(
                PageUpdates(_ints(rows), _ints(entries), _ints(pages)) if pages else NO_PAGES
                for rows, entries, pages in self._updates
            ),
            copies=np.array(self.copies, np.int32) if self.copies else _NO_COPIES,
            num_logprobs=num_logprobs,
            scores=self._scores() if chunks else None,
            pooling=pooling,
            states=None if copies is None else _state_plan(*copies, rows),
            has_drafts=self.drawn() is not None,
            num_proposed=num_proposed,
            returns_drafts=self.returns_drafts and num_proposed > 0,
            catch_up=self.catch_up,
            adapters=None if adapters is None else adapters.plan(rows),
            embeds=embed_plan(chunks, num_decodes) if chunks else None,
            images=images,
            tier=cache.take_tier_plan(),
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
        """Requests that compute and draw nothing: no token in the result says that their positions are committed."""
        requests = [chunk.request for chunk in self.chunks if not chunk.num_drawn]
        return [(request, request.admission, request.computed) for request in requests]

    def scored(self) -> list[tuple[Request, int, int]]:
        """Requests whose prompts are scored, the first scored token, and how many; rows must be in order."""
        return [(chunk.request, chunk.first_scored, chunk.num_scored) for chunk in self.chunks if chunk.num_scored]

    def _scores(self) -> PromptScores | None:
        indices: list[int] = []
        tokens: list[int] = []
        num_logprobs = 0
        offset = len(self.decodes)  # index of the chunk's first token among all tokens of the step
        for chunk in self.chunks:
            if chunk.num_scored:
                first = chunk.first_scored
                index = offset + first - 1 - chunk.start
                indices += range(index, index + chunk.num_scored)
                tokens += chunk.request.tokens[first : first + chunk.num_scored]
                num_logprobs = max(num_logprobs, chunk.request.params.prompt_logprobs or 0)
            offset += chunk.num_tokens
        return PromptScores(_ints(indices), _ints(tokens), num_logprobs) if indices else None


def embed_plan(chunks: list[Chunk], first: int) -> EmbedPlan | None:
    """The embeddings that requests bring for the tokens of their chunks. `first`: index of the first chunk's first
    token among all tokens of the step."""
    if all(chunk.request.embeds is None for chunk in chunks):
        return None
    indices: list[int] = []
    values = []
    for chunk in chunks:
        embeds, start = chunk.request.embeds, chunk.start
        # tokens that were generated before a preemption come after the embedded ones
        if embeds is not None and not chunk.is_drafted and start < len(embeds):
            values.append(embeds[start : start + chunk.num_tokens])
            indices += range(first, first + len(values[-1]))
        first += chunk.num_tokens
    return EmbedPlan(_ints(indices), tuple(values)) if values else None


def _score_width(request: Request) -> int:
    """Logprobs reported per scored prompt token: its own and those of the likeliest tokens."""
    return 1 + (request.params.prompt_logprobs or 0)


def _state_plan(restores: list[Restore], saves: list[Save], rows: Ints) -> StatePlan:
    """`rows`: of the plan, in order."""
    index_of = dict(zip(rows.tolist(), range(len(rows)), strict=True)) if saves else {}
    restored = [(request.row, checkpoint) for request, checkpoint in restores]
    saved = [
        (index_of[request.row], position, checkpoint)
        for request, position, checkpoint in saves
        if request.row in index_of  # a late save may be of a request that is not planned
    ]
    return StatePlan(
        np.array(restored, np.int32) if restored else _NO_RESTORES, np.array(saved, np.int32) if saved else _NO_COPIES
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32) if values else NO_INTS


# DecodeArrays: the arrays of a plan's decodes, reused by later plans of the same rows.
#
# Most plans decode the same requests as the plan before. Plans share arrays, so an array is never written after it was
# part of a plan.

K = TypeVar("K")
V = TypeVar("V")
Drafted = tuple[tuple[int, int], ...]
"""Drafted rows of a plan: (row, number of positions)."""

_MOST_SHARED = 8  # arrays of earlier plans that later ones share


class DecodeArrays:
    """Rows and lengths of a plan's decodes. While the next plan decodes the same requests, each is one longer."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows: Ints = NO_INTS
        self.lengths: Ints = NO_INTS
        self.is_stale = False  # a commit subtracted rejected drafts from the length of a request
        # arrays of recent plans: steps with and without drafts take turns
        self._rows: dict[tuple[int, ...], Ints] = {}
        self._drafted: dict[tuple[tuple[int, ...], Drafted], tuple[Ints, Ints, Ints]] = {}
        self._row_numbers: tuple[int, ...] = ()  # of `rows`

    def advance(self, requests: list[Request]) -> None:
        """Update the arrays for the next plan. A request cannot change its row without a plan that lacks it."""
        is_same = requests == self.requests
        if is_same and not self.is_stale:
            self.lengths = self.lengths + 1
            return
        if not is_same:
            self.requests = requests
            self._row_numbers = numbers = tuple([request.row for request in requests])
            known = self._rows.get(numbers)
            if known is None:
                known = _keep(self._rows, numbers, np.array(numbers, np.int32))
            self.rows = known
        self.lengths = np.array([request.computed for request in requests], np.int32)
        self.is_stale = False

    def with_drafted(self, drafted: Drafted) -> tuple[Ints, Ints, Ints]:
        """Rows, numbers of positions and of host tokens of a plan of these decodes and then drafted rows: the same
        arrays as in a recent plan of the same rows and numbers of drafts."""
        known = self._drafted.get((self._row_numbers, drafted))
        if known is None:
            num_decodes, total = len(self.rows), len(self.rows) + len(drafted)
            num_tokens = np.ones(total, np.int32)
            num_tokens[num_decodes:] = [num for _, num in drafted]
            rows = np.concatenate([self.rows, np.array([row for row, _ in drafted], np.int32)])
            arrays = rows, num_tokens, np.zeros(total, np.int32)
            known = _keep(self._drafted, (self._row_numbers, drafted), arrays)
        return known


@lru_cache(1024)
def decode_counts(count: int) -> tuple[Ints, Ints, Ints]:
    """Per row of a plan of decodes only: one position, no host token, one drawn token."""
    ones = np.ones(count, np.int32)
    return ones, np.zeros(count, np.int32), ones


def _keep(known: dict[K, V], key: K, value: V) -> V:
    if len(known) >= _MOST_SHARED:
        known.clear()
    known[key] = value
    return value
