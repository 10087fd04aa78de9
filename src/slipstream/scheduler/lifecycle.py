"""RequestLifecycle: moves requests from running to waiting, draining or finished, and frees what they hold."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.contracts.messages import Output
from slipstream.contracts.request import Request, Status, WaitFor
from slipstream.scheduler.adapters import Adapters
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.query_registry import QueryRegistry
from slipstream.scheduler.row_allocator import RowAllocator
from slipstream.scheduler.sibling_samples import detach_from_leader, take_siblings
from slipstream.scheduler.step_outputs import refusal
from slipstream.scheduler.waiting import WaitingQueue


class RequestLifecycle:
    """The scheduler starts requests; they leave their rows here, for whatever reason."""

    def __init__(
        self,
        cache: CacheManager,
        waiting: WaitingQueue,
        rows: RowAllocator,
        queries: QueryRegistry[Request],
        constraints: Constraints | None = None,
        adapters: Adapters[Request] | None = None,
    ) -> None:
        self.live: dict[str, list[Request]] = {}  # by id: samples that have not ended
        self.num_draining = 0
        self._cache = cache
        self._waiting = waiting
        self._rows = rows
        self._queries = queries
        self._constraints = constraints
        self._adapters = adapters

    def requeue(self, request: Request) -> None:
        """Move a running request back to the waiting queue. It is admitted again once its tokens in flight are
        known."""
        self._free_row(request)
        request.num_preemptions += 1
        request.status = Status.WAITING
        self._waiting.push(request, WaitFor.TOKENS if request.pending else WaitFor.NOTHING)
        self.release_siblings(request)

    def drain(self, request: Request) -> None:
        """All positions of a pooling request are launched: release its row and its pages."""
        self._free_row(request)
        request.status = Status.DRAINING
        self.num_draining += 1
        assert request.pooling is not None
        for document in self._queries.launch(request.pooling):
            self._waiting.ready(document, WaitFor.QUERY)

    def finish(self, request: Request) -> None:
        """End a request in any state. Results that are still in flight will be dropped."""
        if request.status is Status.RUNNING:
            self._free_row(request)
        elif request.status is Status.DRAINING:
            self.num_draining -= 1
        else:
            self._waiting.remove(request)
            self._cache.drop_match(request)
        request.status = Status.FINISHED
        if self._constraints is not None and request.is_constrained:
            self._constraints.leave(request)
        if self._adapters is not None:
            self._adapters.leave(request)
        if request.pooling is not None:
            self._queries.end(request.pooling)
        if request.leader is not None:
            detach_from_leader(request)
        if request.siblings:
            self.release_siblings(request)
        live = self.live[request.id]
        if len(live) == 1:
            del self.live[request.id]
        else:
            live.remove(request)

    def take_ready(self) -> Iterator[Output]:
        """Make requests ready whose pages of other engines have arrived or will not, and whose adapter is read or has
        a slot now; refuse those whose adapter cannot be read."""
        if self._cache.imports is not None:
            for request in self._cache.imports.take_done():
                self._waiting.ready(request, WaitFor.PAGES)
        if self._adapters is None:
            return
        for requests, error in self._adapters.take_read():
            for request in requests:
                if error is None:
                    self._waiting.ready(request, WaitFor.ADAPTER)
                else:
                    self.finish(request)
                    yield refusal(request.id, error, request.sample)
        for request in self._adapters.take_unparked():
            self._waiting.ready(request, WaitFor.ADAPTER)

    def release_siblings(self, leader: Request) -> None:
        """The samples that wait for this leader's prompt can be admitted."""
        for sibling in take_siblings(leader):
            self._waiting.ready(sibling, WaitFor.PROMPT)

    def _free_row(self, request: Request) -> None:
        if (num_decoded := request.computed - request.num_known) > 0:
            self._waiting.charge(request, num_decoded)
        self._cache.release(request)
        if self._adapters is not None:
            self._adapters.release(request, request.row)
        self._rows.free(request)
        request.held = False
