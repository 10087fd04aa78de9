"""The interface between scheduler and runner: the scheduler makes a `StepPlan`, the runner returns a `StepResult`.

All arrays are numpy, indexed by row or in the plan's order. An array is never written after it is handed over: a step
may still read it while the next one is planned.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.params.thinking import Thinking

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]

NO_INTS: Ints = np.zeros(0, np.int32)
NULL_PAGE = 0  # no request holds it; padding tokens write to it


class Processed(enum.IntFlag):
    """Edits of a row's logits by logits processors of the user; they come with every step, as `DrawEdits`."""

    NOTHING = 0
    TOKENS = enum.auto()  # a mask and a bias
    LOGITS = enum.auto()  # code that edits the logits before penalties and temperature
    SCALED = enum.auto()  # code that edits the logits after the temperature


@dataclass(frozen=True, slots=True)
class Admission:
    """A generation request gets a row. A request that returns after a preemption is admitted again, with a new
    number."""

    row: int
    number: int  # unique over all admissions of both kinds
    num_prompt_tokens: int  # of the request as submitted
    num_known: int  # tokens that the host knows: the prompt, and tokens generated before a preemption
    num_cached: int  # leading positions whose keys and values are in its pages already
    params: SamplingParams
    seed: int  # 64 bits: the request's own, or derived from the engine's seed and the request's number
    sample: int  # which of the prompt's n samples this is
    stop_ids: tuple[int, ...]  # tokens that may not be drawn before min_tokens
    history: Ints | None  # all known tokens, if its parameters need them (penalties, bad words); else None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be drawn
    long_rope: bool = False  # its positions are rotated by LongRoPE's long factors
    processed: Processed = Processed.NOTHING
    thinking: Thinking | None = None  # markers of reasoning, with a thinking budget
    is_embedded: bool = False  # the prompt is embeddings: `history` has only the generated tokens
    position_shift: int = 0  # position of a token behind the images of the prompt, less its index

    @property
    def num_history_prompt(self) -> int:
        """Leading tokens of `history` that are the prompt's."""
        return 0 if self.is_embedded else self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PoolAdmission:
    """A pooling request gets a row until its prompt is computed."""

    row: int
    number: int  # unique over all admissions of both kinds
    num_prompt_tokens: int
    num_cached: int
    params: PoolingParams  # `task` is set
    long_rope: bool = False


@dataclass(frozen=True, slots=True)
class PageUpdates:
    """Entries of one group's page table that change with this step: table[rows[i], entries[i]] = pages[i]."""

    rows: Ints
    entries: Ints
    pages: Ints


NO_PAGES = PageUpdates(NO_INTS, NO_INTS, NO_INTS)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt tokens whose logprobs this step reports. A token's logprob comes from the position before it."""

    indices: Ints  # [scored] of those positions among all tokens of the step
    tokens: Ints  # [scored] the prompt tokens after them; the last may be the first token of the next chunk
    num_logprobs: int  # likeliest tokens to report for each


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
class StatePlan:
    """Copies between the recurrent states of rows and checkpoints. A checkpoint is the state of a row after its first
    `position` tokens, a multiple of STATE_CHUNK; checkpoints are numbered from 0."""

    restores: Ints  # [n, 2] (row, checkpoint): copied to the row before the forward
    saves: Ints  # [m, 3] (index of the row in `StepPlan.rows`, position, checkpoint): stored by the forward


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Copies between pages and slots of the second cache tier. All stores come before all loads."""

    stores: Ints  # [n, 3] (group, page, slot): the content that the page has before this step
    loads: Ints  # [m, 3] (group, slot, page): copied before the forward reads or writes the page


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A copy of a LoRA adapter from a host buffer to a slot on the device, before the forward. A replay of the plan
    reads the adapter by its path."""

    slot: int
    buffer: int
    name: str
    path: str
    digest: bytes  # of its matrices


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The LoRA adapters of a step. A slot holds one adapter on the device; a host buffer holds one in host memory."""

    slots: Ints | None  # [planned] slot of the row's adapter, -1: none; None: no row has an adapter
    loads: tuple[AdapterLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """Tokens of a step whose embeddings the host gives, instead of the model's table."""

    indices: Ints  # [embedded] among all tokens of the step
    values: tuple[Floats, ...]  # the embeddings of these tokens, part after part: each [tokens, hidden size]


@dataclass(frozen=True, slots=True)
class ImageEncoding:
    """An image that the tower encodes before the forward."""

    patches: NDArray[np.uint8]  # [patches, values]
    grids: tuple[tuple[int, int, int], ...]  # of each view: frames, rows and columns of patches
    rows: Ints  # [image tokens] rows of the device's arena that get the tower's output


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Images that a step encodes, and its tokens that are of images."""

    encodings: tuple[ImageEncoding, ...]
    indices: Ints  # [image tokens] among all tokens of the step
    rows: Ints  # [image tokens] of the arena, in place of their embeddings
    # tokens of prompts up to their last image, if positions have three parts: their position does not follow from
    # their index and the row's `position_shift`
    placed: Ints  # [placed] among all tokens of the step
    positions: Ints  # [3, placed] frame, row, column

    @property
    def num_encoded(self) -> int:
        """Tokens of the encoded images."""
        return sum(len(each.rows) for each in self.encodings)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step, which engines that share experts exchange: of one engine, or the largest of all."""

    tokens: int  # at least 1: an engine without a request computes one padding token
    last_tokens: int  # tokens in layers that compute only the last token of each row
    is_single: bool  # every row has one token
    only_last: bool  # only the last token of each row is read, so `last_tokens` is the number of rows
    can_replay: bool  # a CUDA graph of this size exists or can be captured

    def joined(self, other: StepSizes) -> StepSizes:
        """The sizes that a step of both engines needs."""
        return StepSizes(
            max(self.tokens, other.tokens),
            max(self.last_tokens, other.last_tokens),
            self.is_single and other.is_single,
            self.only_last and other.only_last,
            self.can_replay and other.can_replay,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, in this order: releases, admissions, page updates, copies to and from the second tier, page
    copies, restores of states, the forward, the heads."""

    step: int
    released: Ints  # rows that are free again
    admitted: tuple[Admission, ...]

    rows: Ints  # [planned] rows that compute; decode rows (one token) first
    num_tokens: Ints  # [planned] positions that the row computes, at least 1
    lengths: Ints  # [planned] length of the row after this step; an upper bound while drafts are in flight
    # [planned] tokens to draw, one after each of the row's last `num_drawn` positions: 0 (a prompt chunk that is not
    # the last, or a pooled prompt), 1, or 1 + drafts. The device accepts the first drawn token, and each further one as
    # long as all drawn tokens before it equal the drafts.
    num_drawn: Ints

    # Token ids that the host knows, for the leading `num_host_tokens[i]` positions of each row, row after row. The
    # other positions read the device's own tokens of the row: the token drawn last, then drafts. No other row reads
    # what these positions write to the cache in the same step.
    num_host_tokens: Ints  # [planned]
    tokens: Ints  # [sum(num_host_tokens)]

    new_pages: tuple[PageUpdates, ...]  # one per cache group
    # [planned] the token after each row's positions, if the host knows it, else 0; empty: no row has host tokens
    following: Ints = field(default_factory=lambda: NO_INTS)
    copies: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int32))  # (group, source page, target page)
    # likeliest tokens to report per drawn token, except for rows that request more than MAX_PACKED_LOGPROBS, which are
    # reported apart; None: no logprobs
    num_logprobs: int | None = None
    scores: PromptScores | None = None
    pooling: PoolPlan | None = None  # None: no pooling request is admitted, no prompt ends, no stored query is freed
    states: StatePlan | None = None  # None: no checkpoint is restored or saved
    has_drafts: bool = False  # some row draws more than one token
    num_proposed: int = 0  # drafts that the device proposes for each row after its draw; 0: none
    returns_drafts: bool = False  # the result has the proposed drafts: the host makes masks along them
    # [n, 3] (row, first position, number): positions that a draft model computes before it proposes. It then runs in
    # plans that propose drafts only. None: it follows every step
    catch_up: Ints | None = None
    adapters: AdapterPlan | None = None  # None: no row has an adapter, and none is loaded
    embeds: EmbedPlan | None = None  # None: no request brings embeddings
    images: ImagePlan | None = None  # None: no image is encoded, and no token is in a prompt's part with images
    tier: TierPlan | None = None  # None: no page is copied to or from the second tier
    joint_sizes: StepSizes | None = None  # of all engines that share experts; None: the engine computes alone

    @property
    def catches_up(self) -> bool:
        """Whether a draft model computes positions of earlier steps."""
        return self.catch_up is not None and len(self.catch_up) > 0

    @property
    def all_admitted(self) -> tuple[Admission | PoolAdmission, ...]:
        """Admissions of generation requests, then of pooling requests."""
        return self.admitted if self.pooling is None else (*self.admitted, *self.pooling.admitted)

    @property
    def adapter_slots(self) -> Ints | None:
        """[planned] slot of each row's adapter, -1: none; None: no row has an adapter."""
        return None if self.adapters is None else self.adapters.slots

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class DrawBias:
    """Biases to add to some logits of some rows. Unused ids of a row are token 0 with the value 0."""

    rows: Ints  # [biased]
    ids: Ints  # [biased, width]
    values: Floats  # [biased, width]


@dataclass(frozen=True, slots=True)
class LogitsEdit:
    """Code of the user that edits logits on the device: a copy of one row [vocabulary], or, if it is batched, of the
    rows of all indices [indices, vocabulary]. It runs with the step's head."""

    rows: tuple[int, ...]  # one, or those of all indices; -1: an index that draws nothing in this step
    run: Callable[[Any], Any]  # from logits to logits
    fail: Callable[[Exception], None]  # takes the error of `run`; then no token of these rows is allowed
    is_scaled: bool = False  # after the temperature, else before penalties and temperature
    is_batched: bool = False


@dataclass(frozen=True, slots=True)
class SitOut:
    """Rows that draw nothing in a step, because their masks are late. The forward of the step has computed their last
    position; a later step computes it again, so the row goes back to the position before. Recurrent states stay as
    they are: `RecurrentSteps` tells kernels that they have seen it."""

    rows: Ints  # [sitting]
    computed: Ints  # [sitting] positions before the row's last token
    tokens: Ints  # [sitting] the row's last token


class MaskSource(Protocol):
    """Computes the masks of one request again."""

    def masks_at(self, lengths: Sequence[int], num_words: int) -> list[Ints]:
        """The mask [words] of the draw after each of these numbers of tokens, which ascend."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Memory for the masks of one step. The device has a table: the masks of the step, then masks that it keeps
    for later steps, because the states of texts repeat."""

    bits: Ints  # [masks, words]
    # [masks] each mask in the table: `i` for bits[i], which is the default, `first_kept + k` for a kept one; -1: all
    # tokens are allowed; -2 - t: only token t is. None: the device has no table
    entries: Ints | None = None
    targets: Ints | None = None  # [masks] where in the table bits[i] is stored, by default `i`; -1: it is not sent
    first_kept: int = 0


@dataclass(frozen=True, slots=True)
class DrawEdits:
    """Inputs of a step's head that the host knows only when all older steps are committed: the tokens that rows with a
    grammar may draw, and the edits of logits processors. The runner copies the arrays before it returns: the owner of
    `bits`, `bias` and `offsets` writes them again."""

    rows: Ints  # [masked] rows of the plan that draw under a mask; a row with drafts has a mask for each of its draws
    bits: Ints  # [masked, words] bit t % 32 of word t // 32 is set if token t is allowed
    bias: DrawBias | None = None
    edits: tuple[LogitsEdit, ...] = ()  # in the order in which they run
    offsets: Ints | None = None  # [masked] index of the draw within its row; None: no masked row has drafts
    # [masked] how to compute each mask again: its source, None: all tokens are allowed. None: the masks cannot be
    # computed again. Steps may share the list.
    sources: Sequence[MaskSource | None] | None = None
    lengths: Sequence[int] | None = None  # [masked] the number of tokens before the draw, with `sources`
    sit_out: SitOut | None = None  # None: all rows of the plan draw
    # [masked] see `StepMasks`; None: the mask of each draw is in `bits`
    entries: Ints | None = None
    targets: Ints | None = None


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Values of `logprobs_mode`, by default logprobs of the raw logits. Entry i belongs to the i-th drawn token, or to
    the i-th scored prompt token."""

    chosen: Floats  # [entries]
    rank: Ints  # [entries] 1 is the likeliest
    top_ids: Ints  # [entries, k]
    top: Floats  # [entries, k]
    # [asking, max ids] of drawn tokens of rows with logprob_token_ids, only these rows, in the plan's order
    requested: Floats | None = None
    # of drawn tokens of rows that request more than MAX_PACKED_LOGPROBS, only these rows, in the plan's order
    wide: StepLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that the device drew, in the plan's order. A sampling row is a row whose `num_drawn` is not 0."""

    tokens: Ints  # [drawn] of each sampling row its drawn tokens, accepted ones first
    # [sampling] whether the draw after the accepted tokens failed: the logits held NaN, or no token was left
    failed: Bools
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None  # one entry per scored prompt token
    pooled: tuple[Floats, ...] = ()  # [ending] one result for each prompt that ends, in the plan's order
    pool_failed: frozenset[int] = frozenset()  # indices of entries of `pooled` with NaN or infinite values
    counts: Ints | None = None  # [sampling] number of accepted tokens of the row; None: every row drew one token
    drafts: Ints | None = None  # [sampling, proposed] drafts for the row's next step, -1: none; None: not reported


# Executor, TierCopier and WeightUpdate: the interfaces between the core and a device half.


class Point(Protocol):
    """A timed event on the device."""

    def done(self) -> bool: ...
    def since(self, earlier: Any) -> float:
        """Seconds; `earlier`: a Point of the same device."""


class StepInterval(Protocol):
    """The first and the last event of a step on the device."""

    @property
    def started(self) -> Point: ...
    @property
    def ended(self) -> Point: ...
    @property
    def late(self) -> tuple[Point, Point] | None:
        """The end of the forward, and the arrival of late data from the host; None: the step needed none."""


class Handle(Protocol):
    """A launched step. `wait` waits until its result is on the host.

    A step may have no result: its handle `has_no_result`, `wait` returns at once, and `wait_until_ended` waits until
    the device has finished it.
    """

    @property
    def has_no_result(self) -> bool: ...
    @property
    def interval(self) -> StepInterval | None:
        """None: the device has no clock."""

    def wait(self) -> StepResult: ...
    def done(self) -> bool: ...
    def wait_until_ended(self) -> None: ...


class Executor(Protocol):
    """Runs plans, in order, without waiting for them. `finish` gets `late` if the host takes part in a draw."""

    def launch(self, plan: StepPlan) -> None: ...
    def finish(self, late: DrawEdits | None = None) -> Handle: ...
    def free_queries(self, queries: tuple[int, ...]) -> None: ...
    def close(self) -> None: ...


class Peers(Protocol):
    """Other processes that take part in steps. The loop of a core without requests waits for them too."""

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when `is_waited_for` may have become true."""

    def is_waited_for(self) -> bool:
        """Whether `follow` has something to do. Called in every turn of the loop."""

    def follow(self) -> None:
        """Does what the other processes wait for. Raises EngineDead if one has ended."""


class TierCopier(Protocol):
    """Copies pages to and from the second cache tier without a step. Implemented in `runner/page_tier.py`."""

    def copy(self, plan: TierPlan) -> None: ...


class Background(Protocol):
    """Work of threads that requests wait for."""

    @property
    def is_waiting(self) -> bool: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class WeightUpdate(Protocol):
    """Exchanges the weights of one model. Implemented in `nn/update.py`."""

    @property
    def num_missing(self) -> int:
        """Tensors that were dropped, or changed by an update that failed, and not loaded again."""

    def check_can_update(self) -> None: ...
    def drop(self) -> None: ...
    def update(self, source: object) -> None: ...
