"""The waist: all that passes between the half that decides and the half that executes.

`StepPlan` goes down, `StepResult` comes back. Arrays are numpy, indexed by row or by the plan's order, and are
never changed after they were handed over: a step may still be reading them when the next is planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.params import SamplingParams
from slipstream.pooling_params import PoolingParams

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]

NO_INTS: Ints = np.zeros(0, np.int32)
NULL_PAGE = 0  # never handed out; padding points here


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes its seat. A request that was preempted and comes back is admitted anew, with a new number."""

    row: int
    number: int  # of this admission; no two share one
    num_prompt_tokens: int  # of the request as submitted
    num_known: int  # tokens the host knows now: the prompt, and what was generated before a preemption
    num_cached: int  # of those, positions already in its pages
    params: SamplingParams
    seed: int  # 64 bits: the request's own, or made from the engine's seed and the request's number
    sample: int  # which of the prompt's n samples this is
    stop_ids: tuple[int, ...]  # tokens that may not come before min_tokens
    history: Ints | None  # all known tokens, for rows whose parameters look back (penalties, bad words); else None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not come
    long_rope: bool = False  # its positions are rotated by LongRoPE's long factors


@dataclass(frozen=True, slots=True)
class PoolAdmission:
    """A pooling request takes its seat, for as many steps as its prompt takes."""

    row: int
    number: int  # of this admission; no two share one, of whichever kind
    num_prompt_tokens: int
    num_cached: int
    params: PoolingParams  # their task is named
    long_rope: bool = False


@dataclass(frozen=True, slots=True)
class PageUpdates:
    """Places in one group's page table that change with this step: table[rows[i], places[i]] = pages[i]."""

    rows: Ints
    places: Ints
    pages: Ints


NO_PAGES = PageUpdates(NO_INTS, NO_INTS, NO_INTS)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt tokens whose logprobs this step shall report, each from the position before it."""

    places: Ints  # [scored] those positions, counted over all tokens of the step
    tokens: Ints  # [scored] the prompt tokens that follow; the next chunk's first is among them
    num_logprobs: int  # likeliest tokens to report beside each


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pooling part of a step. A prompt *ends* in the step that computes its last position: its result follows."""

    admitted: tuple[PoolAdmission, ...] = ()  # empty for encoders, whose rows last for one step
    ends: Bools | None = None  # [planned] rows whose prompt ends with this step; None: no row
    params: tuple[PoolingParams, ...] = ()  # [ending] of the rows whose prompt ends, in the plan's order
    # [ending] number of the stored query that the prompt is, or is scored against, else -1; None: no row has one
    queries: Ints | None = None
    freed_queries: tuple[int, ...] = ()  # stored queries that no request needs any more; freed with the releases
    type_starts: Ints | None = None  # [planned] first position of token type 1, or the length; None: all types are 0
    num_seen: Ints | None = None  # [planned] leading tokens that the row's tokens attend to; None: all of them


NO_POOLING = PoolPlan()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one trip of the device shall do. Releases come first, then admissions, page updates, copies, the forward."""

    step: int
    released: Ints  # rows given back
    admitted: tuple[Admission, ...]

    rows: Ints  # [planned] rows that compute, decodes (one token) first
    num_tokens: Ints  # [planned] positions each computes, at least 1
    lengths: Ints  # [planned] its length after this step; an upper bound while drafts are in flight
    # [planned] tokens drawn after the last so many positions of the row: 0 (a prompt goes on, or is pooled), 1, or
    # 1 + drafts. Of the drawn tokens the device accepts the first, and each whose predecessors equal the drafts
    num_drawn: Ints

    # Tokens the host knows, for the leading `num_given[i]` positions of each row, one row after another.
    # The rest of a row's positions read what the device itself has for the row: the token it drew last, then drafts.
    # What they leave in the cache no other row reads in the same step.
    num_given: Ints  # [planned]
    tokens: Ints  # [sum(num_given)]

    new_pages: tuple[PageUpdates, ...]  # one a cache group
    copies: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int32))  # (group, from page, to page)
    # likeliest tokens to report for each sampling row but those that want more than MAX_PACKED_LOGPROBS, which get
    # their own; None: no logprobs at all
    num_logprobs: int | None = None
    scores: PromptScores | None = None
    pooling: PoolPlan | None = None  # None: no pooling request is admitted, no prompt ends, no stored query is freed

    @property
    def all_admitted(self) -> tuple[Admission | PoolAdmission, ...]:
        """Admissions of generation requests, then of pooling requests."""
        return self.admitted if self.pooling is None else (*self.admitted, *self.pooling.admitted)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Of the raw logits. Entry i belongs to the plan's i-th drawn token, or to its i-th scored prompt token."""

    chosen: Floats  # [entries]
    rank: Ints  # [entries] 1 is the likeliest
    top_ids: Ints  # [entries, k]
    top: Floats  # [entries, k]
    # [asking, most ids] for drawn tokens of rows with logprob_token_ids, those alone, in order
    given: Floats | None = None
    long: StepLogprobs | None = (
        None  # drawn tokens of rows that want more than MAX_PACKED_LOGPROBS, those alone, in order
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device drew, in the plan's order. A sampling row is one whose `num_drawn` is not 0."""

    tokens: Ints  # [drawn] the tokens of each sampling row, accepted ones first
    # [sampling] after its accepted tokens (none, where it drew one) the row's logits held NaN, or left no token to draw
    failed: Bools
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None  # one entry for each of the plan's scored prompt tokens
    pooled: tuple[Floats, ...] = ()  # [ending] one result for each prompt that ends, in the plan's order
    pool_failed: frozenset[int] = frozenset()  # places in `pooled` of those whose numbers are not numbers
    counts: Ints | None = None  # [sampling] how many of a row's drawn tokens are accepted; None: all
