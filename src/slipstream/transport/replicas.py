"""ReplicaClient: one CoreClient over several cores with the same models.

Each request goes to one replica (`replica_routing.py`); documents of a late-interaction query go to the replica of the
query. When a replica dies, its requests that have sent nothing run again on another replica; the others end with
ReplicaLost. The dead replica is started again after a delay that doubles with each death. A request that was running
when two replicas died is not run again: it may be the cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from slipstream.base.errors import EngineClosed, EngineDead, InvalidOption, ReplicaLost, UserError
from slipstream.base.processes import Backoff
from slipstream.config.options import Options
from slipstream.contracts.messages import Abort, Output, Submit, SubmitAll
from slipstream.metrics.stats import LaneStats, ReplicaStats
from slipstream.params.pooling import PoolingParams
from slipstream.transport.client import CoreClient, Listener
from slipstream.transport.frames import (
    MAX_RESULT,
    AbortAll,
    AbortedAll,
    Begun,
    Control,
    Controlled,
    Failed,
    FromCore,
    Inspect,
    Inspected,
    Loading,
    ModelDescriptions,
    Pulse,
    Ready,
    Refused,
    ResetPrefixCache,
    ToCore,
)
from slipstream.transport.replica_routing import ReplicaLoad, RequestCost, choose_replica
from slipstream.transport.replica_start import ReplicaProcesses, num_replicas

status = logging.getLogger("slipstream.status")

MAX_RUNS = 2
"""Replicas on which a request may run."""


class ReplicaSource(Protocol):
    """Starts the cores."""

    async def start(self, index: int) -> CoreClient: ...

    async def ended(self, index: int) -> str | None:
        """Waits for the end of a core whose connection is lost; returns how it ended, None if that is not known."""

    async def close(self) -> None: ...


class SentRequest:
    """A request that has not finished."""

    def __init__(self, submit: Submit, *, muted: bool = False) -> None:
        """`muted`: outputs are dropped, because the front end has the result from a replica that died later."""
        self.submit = submit
        self.muted = muted
        self.unfinished = set(range(submit.num_samples))
        self.has_output = False
        self.num_runs = 0
        self.cost: RequestCost | None = None


class Replica:
    """One core over all its restarts; the Listener of its client."""

    def __init__(self, index: int, owner: ReplicaClient, backoff: Backoff) -> None:
        self.index = index
        self.owner = owner
        self.backoff = backoff
        self.client: CoreClient | None = None
        self.is_ready = False
        self.is_given_up = False
        self.load = ReplicaLoad()
        self.requests: dict[str, SentRequest] = {}  # by request id
        self.lanes: list[LaneStats] = []
        self.pid: int | None = None
        self.num_restarts = 0
        self.num_rerouted = 0
        self.task: asyncio.Task[None] | None = None  # starts the core

    def receive(self, messages: list[FromCore]) -> None:
        self.owner.receive_from(self, messages)

    def fail(self, error: BaseException) -> None:
        self.owner.lose(self, error)

    def stats(self) -> ReplicaStats:
        count = (self.num_restarts, self.load.num_open, self.num_rerouted)
        return ReplicaStats(self.index, self.is_ready, *count, self.pid)


class ReplicaClient:
    max_result: int | None = MAX_RESULT

    def __init__(self, source: ReplicaSource, count: int, backoff: Callable[[], Backoff] = Backoff) -> None:
        self.replicas = [Replica(index, self, backoff()) for index in range(count)]
        self.cause: str | None = None  # of a failure of all replicas, or of the first start of one
        self._source = source
        self._listener: Listener | None = None
        self._error: BaseException | None = None
        self._has_opened = False  # all replicas have been ready once
        self._has_described = False  # the models were described to the listener
        self._queries = ReplicaQueries()
        self._unsent: list[SentRequest] = []  # while no replica is ready
        self._resets: dict[str, set[int]] = {}  # by call: replicas that have not reset their prefix caches yet

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    def listen(self, listener: Listener) -> None:
        if self._listener is None:
            self._listener = listener
            for replica in self.replicas:
                replica.task = asyncio.ensure_future(self._start(replica))

    async def close(self) -> None:
        if self._error is None:
            self._error = EngineClosed("the engine was closed")
        for replica in self.replicas:
            if replica.task is not None:
                replica.task.cancel()
        for replica in self.replicas:
            if replica.client is not None:
                await replica.client.close()
        await self._source.close()

    # Messages of the front end

    def send(self, message: ToCore) -> None:
        if isinstance(message, Submit | SubmitAll):
            self._submit([SentRequest(submit) for submit in message.submits])
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, AbortAll):  # there is no other front end
            self._reply(AbortedAll(message.call, 0))
        elif isinstance(message, Inspect):
            fact = "steps of several replicas are not recorded or traced together; start one replica"
            self._reply(Inspected(message.call, b"", fact))
        elif isinstance(message, Control):
            error = InvalidOption("replicas do not sleep and keep their weights; start one replica")
            self._reply(Controlled(message.call, False, Refused.of("", error)))
        elif isinstance(message, ResetPrefixCache):
            self._resets[message.call] = {replica.index for replica in self.replicas if replica.is_ready}
            for replica in self.replicas:
                replica.load.forget_pages()
                if replica.is_ready and replica.client is not None:
                    replica.client.send(message)
            asyncio.get_running_loop().call_soon(self._finish_resets)

    def _reply(self, message: FromCore) -> None:
        messages = [message]
        asyncio.get_running_loop().call_soon(self._pass_on, messages)

    def _submit(self, requests: list[SentRequest]) -> None:
        """Sends requests to one replica; holds them while none is ready."""
        submits = [request.submit for request in requests]
        index = self._queries.replica_of(submits)
        ready = [replica for replica in self.replicas if replica.is_ready and index in (None, replica.index)]
        if not ready:
            self._unsent += requests
            return
        lane = next((lane for lane in ready[0].lanes if submits[0].model in ("", lane.model)), LaneStats(""))
        loads, limits = [each.load for each in ready], (lane.page_size, lane.num_pages, lane.max_loras)
        chosen, costs = choose_replica(loads, submits, *limits)
        replica = ready[chosen]
        for request, cost in zip(requests, costs, strict=True):
            request.cost = cost
            request.num_runs += 1
            replica.requests[request.submit.request_id] = request
            self._queries.assign(request.submit, replica.index)
        assert replica.client is not None
        try:
            replica.client.send(submits[0] if len(submits) == 1 else SubmitAll(submits))
        except UserError:
            for request in requests:
                self._end(replica, request)
            raise

    def _abort(self, message: Abort) -> None:
        name = message.request_id
        owner = next((replica for replica in self.replicas if name in replica.requests), None)
        for replica in self.replicas if owner is None else [owner]:  # any may keep the query of a finished request
            if replica.is_ready and replica.client is not None:
                replica.client.send(message)
        if owner is not None:
            request = owner.requests[name]
            request.unfinished -= request.unfinished if message.sample is None else {message.sample}
            if not request.unfinished:
                self._end(owner, request)
        if message.sample is None:
            self._unsent = [each for each in self._unsent if each.submit.request_id != name]
            self._queries.drop(name)

    def _end(self, replica: Replica, request: SentRequest) -> None:
        del replica.requests[request.submit.request_id]
        assert request.cost is not None
        request.cost.end()
        self._queries.end(request.submit)

    # Messages of the replicas

    def receive_from(self, replica: Replica, messages: Sequence[FromCore]) -> None:
        passed = [taken for message in messages if (taken := self._take(replica, message)) is not None]
        self._pass_on(passed)
        if any(isinstance(message, ResetPrefixCache) for message in messages):
            self._finish_resets()

    def _take(self, replica: Replica, message: FromCore) -> FromCore | None:
        """Returns the message for the front end; None if it gets none."""
        if isinstance(message, Output):
            return self._take_output(replica, message)
        if isinstance(message, Begun):
            return Begun([name for name in message.request_ids if name in replica.requests])
        if isinstance(message, Refused):
            if (request := replica.requests.get(message.request_id)) is not None:
                self._end(replica, request)
            return message
        if isinstance(message, Pulse):
            replica.lanes = [msgspec.structs.replace(lane, replica=replica.index) for lane in message.lanes]
            return self._pulse()
        if isinstance(message, ModelDescriptions):
            replica.pid = message.pid
            described, self._has_described = self._has_described, True
            return None if described else message
        if isinstance(message, Ready):
            return self._take_ready(replica)
        if isinstance(message, Loading):
            return None if self._has_opened else Loading(f"replica {replica.index}: {message.stage}")
        if isinstance(message, ResetPrefixCache) and message.call in self._resets:
            self._resets[message.call].discard(replica.index)
        return None

    def _take_output(self, replica: Replica, output: Output) -> Output | None:
        request = replica.requests.get(output.request_id)
        if request is None:
            return None  # aborted meanwhile
        assert request.cost is not None
        request.has_output = True
        request.cost.decode()
        if output.finish_reason is not None:
            request.unfinished.discard(output.sample)
            if not request.unfinished:
                self._end(replica, request)
        return None if request.muted else output

    def _take_ready(self, replica: Replica) -> FromCore:
        replica.is_ready = True
        if self._has_opened:
            status.info("replica %d is ready again", replica.index)
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            self._submit([request])
        if self._has_opened or not all(each.is_ready for each in self.replicas):
            return self._pulse()
        self._has_opened = True
        return Ready()

    def _pulse(self) -> Pulse:
        lanes = [lane for replica in self.replicas for lane in replica.lanes]
        return Pulse(lanes, [replica.stats() for replica in self.replicas])

    # Starts and deaths

    async def _start(self, replica: Replica) -> None:
        try:
            client = await self._source.start(replica.index)
        except Exception as error:
            self.lose(replica, error)
            return
        replica.client = client
        client.listen(replica)

    def lose(self, replica: Replica, error: BaseException) -> None:
        """Takes a dead replica out, and reroutes or ends its requests."""
        if self._error is not None:
            return
        lost, replica.requests = list(replica.requests.values()), {}
        replica.is_ready, replica.client, replica.lanes, replica.load = False, None, [], ReplicaLoad()
        if not self._has_opened:
            self._fail(error)
            return
        delay = replica.backoff.died(time.monotonic())
        if delay is None:
            replica.is_given_up = True
            status.error("replica %d was lost: %s; it is not started again", replica.index, error)
            if all(each.is_given_up for each in self.replicas):
                self._fail(EngineDead(f"all replicas were lost; the last: {error}"))
                return
        else:
            status.error("replica %d was lost: %s; starting it again in %g s", replica.index, error, delay)
            replica.task = asyncio.ensure_future(self._restart(replica, delay))
        again = [SentRequest(submit, muted=True) for submit in self._queries.lose(replica.index)]
        ended: list[FromCore] = []
        for request in lost:
            if request.has_output or request.num_runs >= MAX_RUNS:
                self._queries.end(request.submit)
                ended.append(_lost_request(request, replica.index))
            else:
                again.append(request)
                replica.num_rerouted += 1
        self._pass_on([*ended, self._pulse()])
        for request in again:
            request.submit = self._queries.refreshed(request.submit)
            self._submit([request])
        self._finish_resets()

    async def _restart(self, replica: Replica, delay: float) -> None:
        if (how := await self._source.ended(replica.index)) is not None:
            status.error("replica %d: %s", replica.index, how)
        await asyncio.sleep(delay)
        replica.num_restarts += 1
        await self._start(replica)

    def _fail(self, error: BaseException) -> None:
        self._error, self.cause = error, str(error)
        for replica in self.replicas:
            if replica.task is not None and replica.task is not asyncio.current_task():
                replica.task.cancel()
        if self._listener is not None:
            self._listener.receive([Failed(self.cause)])
            self._listener.fail(error)

    def _finish_resets(self) -> None:
        """Replies to calls whose replicas have all reset their caches or died."""
        ready = {replica.index for replica in self.replicas if replica.is_ready}
        for call, missing in list(self._resets.items()):
            if not missing & ready:
                del self._resets[call]
                self._pass_on([ResetPrefixCache(call)])

    def _pass_on(self, messages: list[FromCore]) -> None:
        if messages and self._listener is not None:
            self._listener.receive(messages)


def _lost_request(request: SentRequest, index: int) -> Refused:
    if request.has_output:
        text = f"replica {index} died after it had sent a part of the result; send the request again"
    else:
        text = f"{request.num_runs} replicas died while they ran the request; it is not run again"
    return Refused.of(request.submit.request_id, ReplicaLost(text))


# ReplicaQueries: the replica that stores each late-interaction query, so that its documents are sent there.
#
# A query is kept here until all its documents have ended, as in the core (`scheduler/query_registry.py`). If its
# replica dies, the query is computed again on another replica, for the documents that are left.


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


# Chooses what starts the cores of an engine: this process, processes of this machine, or a Ray cluster.


class CountedSource(ReplicaSource, Protocol):
    @property
    def count(self) -> int:
        """Number of replicas."""


def has_replicas(options: Sequence[Options]) -> bool:
    """Whether cores are started by `open_replicas`: several of them, or one on a Ray cluster."""
    return num_replicas(options) > 1 or _uses_ray(options)


def open_replicas(options: Sequence[Options]) -> CountedSource:
    if not _uses_ray(options):
        return ReplicaProcesses(options)
    from slipstream.transport.ray_replicas import RayReplicas

    return RayReplicas(options)


def _uses_ray(options: Sequence[Options]) -> bool:
    backends = {each.distributed_executor_backend for each in options}
    if "ray" in backends and len(backends) > 1:
        raise InvalidOption("models of one engine run in the same processes; give all distributed_executor_backend ray")
    return "ray" in backends
