"""Request: what the host knows of one sample of one request."""

from __future__ import annotations

import enum

from slipstream.params import SamplingParams
from slipstream.pooling_params import PoolingParams

NEVER = 2**30 - 1  # more tokens than any request has; compares faster than a larger number


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end token, stop token or stop string; or a prompt is pooled
    LENGTH = "length"  # max_tokens or the model length
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # its results were not numbers, or its parameters forbade every token


class Status(enum.Enum):
    WAITING = enum.auto()  # in the queue, or preempted and waiting for its last tokens to be seen
    RUNNING = enum.auto()  # holds a row
    LEAVING = enum.auto()  # of a pooling request all is launched: it holds nothing, and its result is on the way
    FINISHED = enum.auto()


class WaitFor(enum.IntFlag):
    """What a request in the waiting queue waits for besides its turn. Another reason to wait joins here."""

    NOTHING = 0
    PROMPT = enum.auto()  # the first sample of its prompt is computing it
    QUERY = enum.auto()  # of a document: the query that it is scored against
    TOKENS = enum.auto()  # of a preempted request: tokens that it drew before, and that the host has not seen


_NOTHING_SAMPLED = SamplingParams()


class Request:
    """One sample. A prompt with n > 1 becomes n of these with the same id.

    `computed` counts positions launched, `pending` tokens drawn on the device that the host has not seen. With drafts
    in flight both are upper bounds: the commit that learns how many were accepted takes the rejected ones off.
    While it runs, `computed <= len(tokens) + pending`.

    A pooling request draws no token: it ends when its prompt is computed.
    """

    __slots__ = (
        "id", "sample", "number", "params", "pooling", "priority", "caller", "cache_salt", "stop_ids", "bad_words",
        "seed", "tokens", "num_prompt", "max_length", "status", "waits_for", "row", "admission", "num_known",
        "computed", "committed", "pending", "runway", "num_cached", "num_preemptions", "caught_up", "leader",
        "siblings", "unscored", "num_logprobs", "list_sizes", "num_staged_ids", "pages", "capacity", "hashes",
        "num_published", "publish_after", "long_rope", "short_limit",
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
        max_length: int,
        seed: int = 0,
    ) -> None:
        self.id = id
        self.sample = sample
        self.number = -1  # order of submission, set by the scheduler
        self.pooling = params if isinstance(params, PoolingParams) else None
        self.params = params = _NOTHING_SAMPLED if isinstance(params, PoolingParams) else params
        self.priority = priority
        self.caller = caller  # requests of one priority are seated by fair turns of their callers
        self.cache_salt = cache_salt
        self.stop_ids = frozenset(stop_ids)  # every token that ends it: end tokens unless ignored, and its own
        self.bad_words = bad_words  # token sequences
        self.seed = seed
        self.tokens = list(prompt)  # all known tokens, prompt first
        self.num_prompt = len(prompt)
        self.max_length = max_length  # prompt and output together: max_tokens or the model length, whichever is less

        self.status = Status.WAITING
        self.waits_for = WaitFor.NOTHING
        self.row = -1
        self.admission = -1  # number of the present admission; -1 without a row
        self.num_known = 0  # tokens known when it was admitted; later ones are read on the device
        self.computed = 0
        self.committed = 0  # of those, before its first token is drawn: see `num_committed`
        self.pending = 0
        self.runway = 0  # until `computed` gets there it decodes one by one and the scheduler need not look closer
        self.num_cached = 0  # positions found in the cache when it was first admitted
        self.num_preemptions = 0
        self.caught_up = -1  # the step that launched the last of its known tokens
        # the next prompt token whose logprob is to be asked for; NEVER when there is none. It only goes up: what was
        # launched before a preemption is still delivered. Of a prompt's samples the first asks for all
        self.unscored = NEVER if params.prompt_logprobs is None or sample or len(prompt) < 2 else 1
        self.num_logprobs: int | None = None  # with each token; asked for in every step
        # of what the device keeps or reports for it in a line as long as anybody's: numbers in a report of its own,
        # stop ids, bad words and a line for its last tokens, tokens of the longest; None, mostly: nothing of all that
        self.list_sizes: tuple[int, ...] | None = None
        self.num_staged_ids = 0
        if self.pooling is None:
            self.num_logprobs = params.num_logprobs
            num_stops = len(self.stop_ids) if params.min_tokens else 0
            if params.report_width or num_stops or bad_words:
                longest = max(map(len, bad_words), default=0)
                self.list_sizes = (params.report_width, num_stops, len(bad_words) + bool(bad_words), longest)
            # numbers an admission of it brings to the device beside its pages and its history
            self.num_staged_ids = (
                num_stops
                + len(params.allowed_token_ids or ())
                + 3 * len(params.logit_bias or ())  # an id, and a value of up to 8 bytes
                + 2 * sum(map(len, bad_words))  # an id and its place
                + len(params.given_ids)
            )

        # the samples of one prompt: the first leads, the others wait for its pages
        self.leader: Request | None = None  # until this one is admitted
        self.siblings: list[Request] = []  # samples that wait for this one's prompt

        # LongRoPE, set at admission: whether it has the long factors, and the length up to which the short ones serve
        self.long_rope = False
        self.short_limit = NEVER

        # the cache manager's notes
        self.pages: list[list[int]] = []  # per group
        self.capacity = 0  # positions these pages can hold
        self.hashes: list[bytes] = []  # of its leading full pages of known tokens
        self.num_published = 0  # leading pages that others may find
        self.publish_after = NEVER  # once it knows more tokens than this there are pages to publish

    @property
    def num_committed(self) -> int:
        """Positions of this admission whose step the host has seen the result of."""
        num_tokens = len(self.tokens)
        return num_tokens - 1 if num_tokens > self.num_known else self.committed

    @property
    def last_computed(self) -> int:
        """Positions that may be computed in this admission, at most: the last token needs no position."""
        return min(self.max_length - 1, self.short_limit)

    def set_runway(self) -> None:
        """All its known tokens are launched, or it got pages."""
        self.runway = min(self.capacity, self.last_computed)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def __repr__(self) -> str:
        return (
            f"Request({self.id}/{self.sample} {self.status.name.lower()} row {self.row} "
            f"tokens {len(self.tokens)}+{self.pending} computed {self.computed})"
        )
