"""Queries: late interaction's account of which queries the device keeps, and for how many documents.

A query stays on the device until as many documents as it said have come and gone, by whichever end, or until its
owner gives it up. The host alone counts: the device is told which to forget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream.errors import QueueFull, RequestTooLarge, UserError
from slipstream.pooling_params import PoolingParams

R = TypeVar("R")  # the scheduler's own kind of request


class QueryRegistry(Generic[R]):
    """By the key that a query and its documents name; those without one are nobody's here."""

    def __init__(self, max_num_tokens: int) -> None:
        """`max_num_tokens`: of all queries that are kept at once."""
        self._max_num_tokens = max_num_tokens
        self._num_tokens = 0
        self._kept: dict[str, _Query[R]] = {}
        self._key_of: dict[str, str] = {}  # by the query's request id
        self._freed: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def enter(self, request_id: str, request: R, params: PoolingParams, num_tokens: int) -> bool:
        """A query begins, or a document claims one of its uses. False for a document that must wait for its query."""
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
                f"under the limit of {self._max_num_tokens}; send their documents, or give them up, first"
            )

    def number_of(self, params: PoolingParams) -> int:
        """What the device knows the query by that this is, or is scored against; -1 for none."""
        return self._kept[params.query_key].number if params.query_key else -1

    def launch(self, params: PoolingParams) -> list[R]:
        """All positions of this request are launched. If it is a query, the documents that waited for it, which may be
        taken from the next step on."""
        if not params.is_query:
            return []
        query = self._kept[params.query_key]
        query.is_launched = True
        waiting, query.waiting = query.waiting, []
        return waiting

    def end(self, params: PoolingParams) -> None:
        """This request is over, by whichever end."""
        if params.query_key:
            self._kept[params.query_key].live -= 1
            self._drop_if_unused(params.query_key)

    def give_up(self, request_id: str) -> list[R]:
        """The owner of a query wants it no more, computed or not. Returns documents that can now never be scored."""
        key = self._key_of.get(request_id)
        if key is None:
            return []
        query = self._kept[key]
        query.unclaimed = 0
        lost, query.waiting = query.waiting, []
        self._drop_if_unused(key)
        return lost

    def is_kept(self, request_id: str) -> bool:
        """Whether that request's query may still be asked for."""
        return request_id in self._key_of

    def waiting(self) -> list[R]:
        """Documents whose query is not launched."""
        return [document for query in self._kept.values() for document in query.waiting]

    def take_freed(self) -> tuple[int, ...]:
        """Those dropped since the last plan."""
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
    number: int  # what the device knows it by
    request_id: str
    num_tokens: int
    unclaimed: int  # documents that may still come
    live: int = 1  # itself and documents that came, as long as they are not done
    is_launched: bool = False
    waiting: list[R] = field(default_factory=list)  # documents that came before it was launched
