"""Request: the scheduler's state of one sample of one request."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.contracts.images import PromptImages
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import RepetitionDetectionParams, SamplingParams
from slipstream.params.thinking import Thinking

if TYPE_CHECKING:
    from slipstream.scheduler.grammar.session import Session
    from slipstream.scheduler.request_processors import RequestProcessors


NEVER = 2**30 - 1  # more tokens than any request has; a small int compares faster than a larger one


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end token, stop token or stop string; or the prompt is pooled
    LENGTH = "length"  # max_tokens or the model length
    REPETITION = "repetition"  # the last tokens are one pattern, as often as `repetition_detection` says
    ABORT = "abort"  # the caller aborted it
    ERROR = "error"  # NaN or infinite results, or the parameters forbid every token


class Status(enum.Enum):
    WAITING = enum.auto()  # in the waiting queue
    RUNNING = enum.auto()  # holds a row
    DRAINING = enum.auto()  # a pooling request whose positions are all launched: no row, no pages, its result in flight
    FINISHED = enum.auto()


class WaitFor(enum.IntFlag):
    """The event that a request in the waiting queue waits for besides its turn. A new reason to wait is a new flag."""

    NOTHING = 0
    PROMPT = enum.auto()  # the first sample of its prompt is computing the prompt
    QUERY = enum.auto()  # a document: the query that it is scored against is not launched yet
    TOKENS = enum.auto()  # a preempted request: tokens that it drew are still in flight
    GRAMMAR = enum.auto()  # the grammar of its output is being compiled
    PAGES = enum.auto()  # pages of its prompt are being fetched from another engine
    ADAPTER = enum.auto()  # its LoRA adapter is being read, or all slots for adapters are in use
    IMAGE = enum.auto()  # the next plan: this one encodes enough images of others


class RequestStates:
    """The checkpoints of recurrent states of one running request."""

    __slots__ = ("saves", "unpublished", "latest")

    def __init__(self, saves: list[int]) -> None:
        self.saves = saves  # positions of known tokens where a checkpoint will be taken, the next one last
        # (position, checkpoint) saved while decoding; the host does not know all tokens before the position yet
        self.unpublished: list[tuple[int, int]] = []
        self.latest: bytes | None = None  # hash of the newest checkpoint after generated tokens


_DEFAULT_PARAMS = SamplingParams()


class Repetition:
    """Counts, for each size of a pattern, how many of the last generated tokens equal the one that many before."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = np.arange(1, params.max_pattern_size + 1)
        self._wanted = np.where(sizes < params.min_pattern_size, NEVER, sizes * min(params.min_count - 1, NEVER))
        self._before = np.full(len(sizes), -1, np.int32)  # the last tokens, the newest first
        self._equal = np.zeros(len(sizes), np.int32)

    def ends_with(self, token: int) -> bool:
        """Takes the next generated token. Returns whether a pattern is now repeated as often as asked for."""
        self._equal += 1
        self._equal *= self._before == token
        self._before[1:] = self._before[:-1]
        self._before[0] = token
        return bool((self._equal >= self._wanted).any())


class Request:
    """One sample. A prompt with n > 1 becomes n requests with the same id.

    `computed` counts launched positions, `pending` tokens drawn on the device whose result is still in flight. With
    drafts in flight both are upper bounds: the commit subtracts the rejected drafts. While a request runs,
    `computed <= len(tokens) + pending`.

    A pooling request draws no token. It ends when its prompt is computed.
    """

    __slots__ = (
        "id", "sample", "number", "params", "pooling", "priority", "caller", "cache_salt", "stop_ids", "bad_words",
        "seed", "tokens", "num_prompt", "max_length", "status", "waits_for", "row", "admission", "num_known",
        "computed", "committed", "pending", "decode_limit", "num_cached", "num_preemptions", "known_launched_at",
        "leader", "siblings", "next_scored", "num_logprobs", "list_sizes", "num_staged_ids", "pages", "capacity",
        "hashes", "num_published", "publish_after", "states", "next_border", "long_rope", "short_limit",
        "thinking", "session", "processors", "held", "lora", "adapter", "embeds", "drafted",
        "images", "repetition",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: list[int],
        params: SamplingParams | PoolingParams,
        *,
        sample: int = 0,
        priority: int = 0,
        caller: str = "",
        cache_salt: str = "",
        stop_ids: tuple[int, ...] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
        thinking: Thinking | None = None,
        max_length: int,
        seed: int = 0,
        lora: LoRARequest | None = None,
        embeds: np.ndarray[Any, Any] | None = None,
        images: PromptImages | None = None,
    ) -> None:
        self.id = id
        self.sample = sample
        self.number = -1  # order of submission, set by the scheduler
        self.pooling = params if isinstance(params, PoolingParams) else None
        self.params = params = _DEFAULT_PARAMS if isinstance(params, PoolingParams) else params
        self.priority = priority
        self.caller = caller  # callers of one priority are served by fair queueing
        self.cache_salt = cache_salt
        # tokens that end the request: end tokens unless ignored, and stop_token_ids
        self.stop_ids = frozenset(stop_ids)
        self.bad_words = bad_words  # token sequences
        self.thinking = thinking  # markers of reasoning, with a thinking budget
        self.seed = seed
        self.lora = lora  # the adapter of the request
        self.embeds = embeds  # [num_prompt, hidden] embeddings of the prompt, whose token ids are 0; None: by token id
        self.images = images  # of the prompt; None: it has none
        self.adapter: Adapter | None = None  # set by `Adapters`, from submission to the end
        self.tokens = list(prompt)  # all known tokens, prompt first
        self.num_prompt = len(prompt)
        self.max_length = max_length  # of prompt and output: limited by max_tokens and by the model length

        self.status = Status.WAITING
        self.waits_for = WaitFor.NOTHING
        self.row = -1
        self.admission = -1  # number of the current admission; -1 without a row
        self.num_known = 0  # tokens known at admission; later ones are read on the device
        self.computed = 0
        self.committed = 0  # committed positions while no token of this admission is known: see `num_committed`
        self.pending = 0
        # while `computed` is below, the request decodes one token per step without further checks
        self.decode_limit = 0
        self.num_cached = 0  # positions found in the cache at the first admission
        self.num_preemptions = 0
        self.known_launched_at = -1  # the step that launched the last of its known tokens
        # The next prompt token whose logprob is to be computed; NEVER if there is none. It never decreases: scores that
        # were launched before a preemption are still delivered. Only the first sample of a prompt is scored.
        self.next_scored = NEVER if params.prompt_logprobs is None or sample or len(prompt) < 2 else 1
        self.num_logprobs: int | None = None  # per drawn token
        # Sizes of its entries in device tables, whose entries are all as long as the longest: wide logprobs, stop ids,
        # bad words, tokens of the longest bad word. None: no entries.
        self.list_sizes: tuple[int, ...] | None = None
        self.num_staged_ids = 0
        detection = params.repetition_detection
        self.repetition = Repetition(detection) if detection is not None and detection.max_pattern_size else None
        if self.pooling is None:
            self.num_logprobs = params.num_logprobs
            num_stops = len(self.stop_ids) if params.min_tokens else 0
            if params.wide_width or num_stops or bad_words:
                longest = max(map(len, bad_words), default=0)
                self.list_sizes = (params.wide_width, num_stops, len(bad_words), longest)
            # integers that its admission uploads besides page-table entries and history
            self.num_staged_ids = (
                num_stops
                + len(params.allowed_token_ids or ())
                + 3 * len(params.logit_bias or ())  # an id, and a value of up to 8 bytes
                + 2 * sum(map(len, bad_words))  # an id and its index
                + len(params.requested_ids)
            )

        # Samples of one prompt: the first is the leader; the others wait until its prompt is computed.
        self.leader: Request | None = None  # until this one is admitted
        self.siblings: list[Request] = []  # samples that wait for this request's prompt

        # Structured output and logits processors
        self.session: Session | None = None  # once the grammar is compiled
        self.processors: RequestProcessors | None = None
        self.held = False  # a running request that the next plans leave out; see `hold`

        # leading positions with entries of a draft model; NEVER: all, or no draft model falls behind (`DraftLag`)
        self.drafted = NEVER

        # LongRoPE, set at admission: whether the long factors are used, and the maximum length for the short ones
        self.long_rope = False
        self.short_limit = NEVER

        # written by the cache manager only
        self.pages: list[list[int]] = []  # per group
        self.capacity = 0  # positions that these pages hold
        self.hashes: list[bytes] = []  # of its leading full pages of known tokens
        self.num_published = 0  # leading pages that other requests can find
        self.publish_after = NEVER  # with more known tokens than this there are pages or checkpoints to publish
        self.states: RequestStates | None = None  # checkpoints of recurrent states; None: not running, or no states
        self.next_border = NEVER  # length at which a checkpoint is taken while the request decodes

    @property
    def cache_key(self) -> tuple[str, bool, bytes]:
        """The parts of page hashes besides tokens: the salt, the kind of rope factors, the digest of the adapter."""
        return self.cache_salt, self.long_rope, b"" if self.adapter is None else self.adapter.digest

    @property
    def num_committed(self) -> int:
        """Positions of this admission whose step is committed."""
        num_tokens = len(self.tokens)
        return num_tokens - 1 if num_tokens > self.num_known else self.committed

    @property
    def last_computed(self) -> int:
        """Maximum number of positions computed in this admission. The last token is never computed."""
        return min(self.max_length - 1, self.short_limit)

    def set_decode_limit(self) -> None:
        """Call when all known tokens are launched, or after pages were reserved."""
        self.decode_limit = min(self.capacity, self.last_computed, self.next_border - 1)

    def choose_rope(self, short: int) -> None:
        """LongRoPE: the short factors up to `short` known tokens, and the long factors beyond. Hashes of pages with
        other factors are dropped."""
        long_rope = len(self.tokens) > short
        if long_rope != self.long_rope:
            self.long_rope, self.hashes = long_rope, []
        self.short_limit = NEVER if long_rope else short

    @property
    def is_constrained(self) -> bool:
        """Whether the host takes part in every draw: by a grammar or by logits processors."""
        return self.params.structured_outputs is not None or self.processors is not None

    def hold(self) -> None:
        """Leave a running request out of the next plans: its next tokens or its mask are not known yet."""
        self.held = True
        self.decode_limit = 0  # so that `Scheduler.plan` checks `held`

    def release_hold(self) -> None:
        self.held = False
        if self.computed >= self.num_known:
            self.set_decode_limit()

    def know_more(self, tokens: list[int]) -> None:
        """Append tokens that the device did not draw. The next plan computes them as a chunk. No token is pending."""
        assert not self.pending and self.computed >= self.num_known, f"{self} cannot take known tokens"
        self.tokens += tokens
        self.committed = self.computed
        self.num_known = len(self.tokens)
        self.held = False
        self.decode_limit = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def __repr__(self) -> str:
        return (
            f"Request({self.id}/{self.sample} {self.status.name.lower()} row {self.row} "
            f"tokens {len(self.tokens)}+{self.pending} computed {self.computed})"
        )


# Adapter: the state of one LoRA adapter in the scheduler.


class Adapter:
    """An adapter that some request uses, or that is still in host memory."""

    __slots__ = ("lora", "buffer", "slot", "digest", "is_read", "job", "num_live", "num_running", "waiting")

    def __init__(self, lora: LoRARequest) -> None:
        self.lora = lora
        self.buffer = -1  # in host memory
        self.slot = -1  # on the device
        self.digest = b""
        self.is_read = False
        self.job: Future[bytes] | None = None  # reads it
        self.num_live = 0  # requests that have not ended
        self.num_running = 0  # requests that the device may still compute with it
        self.waiting: dict[Any, None] = {}  # requests that wait until it is read, or for a slot
