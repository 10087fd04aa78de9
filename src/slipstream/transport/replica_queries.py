"""ReplicaQueries: the replica that stores each late-interaction query, so that its documents are sent there.

A query is kept here until all its documents have ended, as in the core (`scheduler/query_registry.py`). If its replica
dies, the query is computed again on another replica, for the documents that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from slipstream.contracts.messages import Submit
from slipstream.params.pooling import PoolingParams


class ReplicaQueries:
    def __init__(self) -> None:
        self._queries: dict[str, _StoredQuery] = {}  # by query_key

    def __len__(self) -> int:
        return len(self._queries)

    def replica_of(self, submits: Sequence[Submit]) -> int | None:
        """The replica that has to run these requests, because it stores the query of one of them; None: any."""
        for submit in submits:
            params = submit.params
            if isinstance(params, PoolingParams) and params.is_document and params.query_key in self._queries:
                return self._queries[params.query_key].replica
        return None

    def assign(self, submit: Submit, replica: int) -> None:
        """A request was sent to a replica."""
        params = submit.params
        if isinstance(params, PoolingParams) and params.is_query:
            known = self._queries.get(params.query_key)
            if known is not None and known.submit.request_id == submit.request_id:
                known.replica = replica
            elif known is None:  # the core refuses a second query with the same key
                self._queries[params.query_key] = _StoredQuery(submit, replica, params.query_uses)

    def end(self, submit: Submit) -> None:
        """A request has ended, for whatever reason."""
        params = submit.params
        if not isinstance(params, PoolingParams) or not params.query_key:
            return
        query = self._queries.get(params.query_key)
        if query is None:
            return
        if params.is_document:
            query.num_left -= 1
            if not query.num_left:
                del self._queries[params.query_key]
        elif query.submit.request_id == submit.request_id:
            query.is_computed = True

    def drop(self, request_id: str) -> None:
        """The request of a query was aborted: no document will follow."""
        for key, query in list(self._queries.items()):
            if query.submit.request_id == request_id:
                del self._queries[key]

    def lose(self, replica: int) -> list[Submit]:
        """The replica has died. Returns its computed queries, which have to be computed again elsewhere."""
        lost = [query for query in self._queries.values() if query.replica == replica]
        for query in lost:
            query.replica = None
        return [query.submit for query in lost if query.is_computed]

    def refreshed(self, submit: Submit) -> Submit:
        """The same request; a query with the number of documents that are left."""
        params = submit.params
        if not isinstance(params, PoolingParams) or not params.is_query or params.query_key not in self._queries:
            return submit
        left = self._queries[params.query_key].num_left
        return msgspec.structs.replace(submit, params=msgspec.structs.replace(params, query_uses=left))


@dataclass(slots=True)
class _StoredQuery:
    submit: Submit
    replica: int | None  # None: its replica has died, and it was not sent again yet
    num_left: int  # documents that have not ended
    is_computed: bool = False
