"""QueryRegistry: which queries of late interaction the device stores, and how many documents still need each.

The device stores a query until `query_uses` documents have ended, for whatever reason, or until the query's request is
aborted. Only the host counts; plans tell the device which queries to free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream.base.errors import InvalidPrompt, PromptTooLong, QueueFull, RequestTooLarge, UserError
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.request import NEVER, Request
from slipstream.params.pooling import PoolingParams
from slipstream.scheduler.cache.manager import CacheManager

R = TypeVar("R")  # Request or EncoderRequest


class QueryRegistry(Generic[R]):
    """Queries by `query_key`. Requests without a key are ignored."""

    def __init__(self, max_num_tokens: int) -> None:
        """`max_num_tokens`: of all stored queries together."""
        self._max_num_tokens = max_num_tokens
        self._num_tokens = 0
        self._kept: dict[str, _Query[R]] = {}
        self._key_of: dict[str, str] = {}  # by the query's request id
        self._freed: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def enter(self, request_id: str, request: R, params: PoolingParams, num_tokens: int) -> bool:
        """Register a query, or a document as one use of its query. False for a document that must wait for its
        query."""
        key = params.query_key
        if not key:
            return True
        query = self._kept.get(key)
        if params.is_query:
            if query is not None:
                raise UserError(f"a query {key!r} is kept already; give each its own query_key")
            if request_id in self._key_of:
                raise UserError(f"request {request_id!r} keeps a query that is not used up; give each its own id")
            self._check_room(num_tokens)
            self._num_tokens += num_tokens
            self._kept[key] = _Query(self._next, request_id, num_tokens, params.query_uses)
            self._key_of[request_id] = key
            self._next += 1
            return True
        if query is None or not query.unclaimed:
            raise UserError(
                f"the query {key!r} is {'not known' if query is None else 'used up'}; submit it before its documents, "
                "with query_uses as large as their number"
            )
        query.unclaimed -= 1
        query.live += 1
        if not query.is_launched:
            query.waiting.append(request)
        return query.is_launched

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens > self._max_num_tokens:
            raise RequestTooLarge(
                f"the query has {num_tokens} tokens, and {self._max_num_tokens} can be kept for documents; shorten it"
            )
        if self._num_tokens + num_tokens > self._max_num_tokens:
            raise QueueFull(
                f"queries of {self._num_tokens} tokens are kept for documents, and one of {num_tokens} does not fit "
                f"under the limit of {self._max_num_tokens}; submit their documents, or abort the queries, first"
            )

    def number_of(self, params: PoolingParams) -> int:
        """The device's number of the query that this request is, or is scored against; -1 for none."""
        return self._kept[params.query_key].number if params.query_key else -1

    def launch(self, params: PoolingParams) -> list[R]:
        """All positions of this request are launched. For a query, returns the documents that waited for it: they can
        run from the next step on."""
        if not params.is_query:
            return []
        query = self._kept[params.query_key]
        query.is_launched = True
        waiting, query.waiting = query.waiting, []
        return waiting

    def end(self, params: PoolingParams) -> None:
        """Ends a request, whatever the reason."""
        if params.query_key:
            self._kept[params.query_key].live -= 1
            self._drop_if_unused(params.query_key)

    def abandon(self, request_id: str) -> list[R]:
        """The request of a query is aborted, computed or not. Returns documents that can never be scored now."""
        key = self._key_of.get(request_id)
        if key is None:
            return []
        query = self._kept[key]
        query.unclaimed = 0
        lost, query.waiting = query.waiting, []
        self._drop_if_unused(key)
        return lost

    def is_kept(self, request_id: str) -> bool:
        """Whether the query of this request is stored, or will be."""
        return request_id in self._key_of

    def take_freed(self) -> tuple[int, ...]:
        """Numbers of queries freed since the last call."""
        if not self._freed:
            return ()
        freed, self._freed = tuple(self._freed), []
        return freed

    def _drop_if_unused(self, key: str) -> None:
        query = self._kept[key]
        if not query.live and not query.unclaimed:
            del self._kept[key]
            del self._key_of[query.request_id]
            self._num_tokens -= query.num_tokens
            self._freed.append(query.number)


@dataclass(slots=True)
class _Query(Generic[R]):
    number: int  # on the device
    request_id: str
    num_tokens: int
    unclaimed: int  # documents that may still be submitted
    live: int = 1  # the query and submitted documents that have not ended
    is_launched: bool = False
    waiting: list[R] = field(default_factory=list)  # documents submitted before the query was launched


# Checks at submission: raises an error for requests that could never run.


def check_length(num_tokens: int, limit: int, *, wants_output: bool) -> None:
    """Check a prompt against the model length. A prompt that is only pooled may fill it."""
    if num_tokens == 0:
        raise InvalidPrompt("the prompt has no tokens; give at least one")
    if num_tokens + wants_output > limit:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, which leaves no room for output within the model "
            f"length of {limit}; shorten it or raise --max-model-len"
            if wants_output
            else f"the prompt has {num_tokens} tokens, the model length is {limit}; shorten it, set "
            "truncate_prompt_tokens or raise --max-model-len"
        )


def check_admissible(request: Request, config: SchedulerConfig, cache: CacheManager) -> None:
    limit, wants_output = config.max_model_len, request.pooling is None
    check_length(request.num_prompt, limit, wants_output=wants_output)
    max_length = limit if wants_output else request.num_prompt + 1
    assert request.num_prompt < request.max_length <= max_length, f"{request} has a max_length of {request.max_length}"
    length = request.max_length - 1  # the last token is never computed
    if not cache.can_ever_fit(length):
        output = f" and up to {request.max_length - request.num_prompt} of output" if wants_output else ""
        hint = "lower max_tokens" if wants_output else "shorten it"
        raise RequestTooLarge(
            f"the prompt's {request.num_prompt} tokens{output} need {cache.pages_for(length)} cache pages, there are "
            f"{cache.num_usable} in all; {hint} or give the cache more memory"
        )
    if request.next_scored != NEVER and not config.chunked_prefill:
        _check_scores(request.num_prompt - 1, request.params.prompt_logprobs or 0, config.max_step_logprobs)


def admits_any_request(config: SchedulerConfig, cache: CacheManager) -> bool:
    """Whether every prompt within the model length can run."""
    return config.chunked_prefill and cache.can_ever_fit(config.max_model_len - 1)


def _check_scores(num_tokens: int, num_logprobs: int, max_elements: int) -> None:
    """Check a prompt that one step computes as a whole."""
    if (total := num_tokens * (1 + num_logprobs)) > max_elements:
        raise RequestTooLarge(
            f"prompt_logprobs is {num_logprobs}, which makes {total:,} values for {num_tokens} tokens; a step reports "
            f"up to {max_elements:,}, and without chunked prefill a prompt is one step; lower prompt_logprobs, "
            "shorten the prompt or leave enable_chunked_prefill on"
        )
