"""State: the shared state of one front end: engine, settings, keys, counters, and admission of requests."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipstream.front.async_engine import AsyncEngine
from slipstream.front.beam_search import BeamGrammars
from slipstream.front.prompts import LONG, OFFLOAD, AnswerPieces
from slipstream.metrics.stats import SharedCounters
from slipstream.metrics.traces import Traces
from slipstream.serve.http.auth import Keys
from slipstream.serve.http.batch.service import BatchService
from slipstream.serve.http.body import Bodies
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.hosts import Hosts
from slipstream.serve.http.responses.store import ResponseStore
from slipstream.serve.http.server_stats import Counters, ServerStats
from slipstream.serve.http.settings import ServerSettings

T = TypeVar("T")

_MAX_CHARS = 2**27  # characters of all texts that are being tokenised or wait for it


class State:
    def __init__(
        self,
        settings: ServerSettings,
        engine: AsyncEngine,
        shared: SharedCounters | None = None,
        responses: Path | None = None,
    ) -> None:
        """`responses`: the store that front ends share."""
        self.settings = settings
        self.engine = engine
        engine.stream_interval = settings.stream_interval
        self.hosts = Hosts(settings)
        self.keys = Keys(settings.api_key, settings.admin_key)
        engine.separates_callers = self.keys.are_several and not settings.share_prefix_cache_between_keys
        self.counters = Counters()
        self.bodies = Bodies(settings, self.counters)
        self.batches: BatchService | None = None  # set by the worker, where the server has a store
        self.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes, responses)
        self.pieces = AnswerPieces()
        self.beam_grammars = BeamGrammars()
        self.started = int(time.time())
        self.draining = False
        self.stalled: str | None = None  # set by the watchdog
        self.server_stats = ServerStats(engine, self.counters, shared, settings.status_interval)
        endpoint = settings.otlp_traces_endpoint
        self.traces = None if endpoint is None else Traces.to(endpoint)
        self.max_requests = -(-settings.max_queued_requests // settings.workers)  # in the queue of this front end
        self._max_tokens = -(-settings.max_queued_tokens // settings.workers)
        self._prefix = secrets.token_hex(6)
        self._request_numbers = itertools.count()

    def drain(self) -> None:
        """Refuses requests from now on."""
        self.draining = True
        self.bodies.drain()

    def new_id(self) -> str:
        return f"{self._prefix}{next(self._request_numbers):08x}"

    def check_ready(self) -> None:
        """Raises while requests cannot be accepted."""
        if self.engine.failure is not None:
            raise self.engine.failure
        if self.draining:
            self.counters.refused["draining"] += 1
            raise HTTPException(503, "the server is shutting down; use another server", retry_after=5, code="draining")
        if not self.engine.is_ready:
            self.counters.refused["not_ready"] += 1
            raise HTTPException(
                503, f"the server is starting ({self.engine.stage}); try again soon", retry_after=5, code="not_ready"
            )

    @property
    def is_full(self) -> bool:
        """Whether the queue has no room for one more prompt of any caller."""
        return self.engine.load.num_not_started >= _with_reserve(self.max_requests)

    def no_room(self, num_requests: int = 1, num_tokens: int = 0, caller: str = "") -> HTTPException | None:
        """Returns the error for requests that do not fit the queue, or None.

        One caller can fill the queue; a reserve of a quarter is for callers with nothing in it.
        """
        load = self.engine.load
        limit, max_num_tokens = self.max_requests, self._max_tokens
        if not load.queued_by[caller]:
            limit, max_num_tokens = _with_reserve(limit), _with_reserve(max_num_tokens)
        if num_requests > self.max_requests:
            return bad_request(
                f"there are {num_requests} prompts, and the queue holds {self.max_requests}; send fewer at once or "
                "raise --max-queued-requests",
                code="too_many_inputs",
            )
        if load.num_not_started + num_requests > limit:
            fact = f"{load.num_not_started} requests are waiting, the limit is {limit}"
        # a prompt above the limit is accepted while the queue is empty
        elif load.queued_tokens and load.queued_tokens + num_tokens > max_num_tokens:
            fact = f"{load.queued_tokens} prompt tokens are waiting, the limit is {max_num_tokens}"
        else:
            return None
        self.counters.refused["queue_full"] += 1
        wait = min(60.0, max(1.0, load.seconds_to_drain()))
        return HTTPException(429, f"{fact}; try again in {wait:.0f} s", retry_after=wait, code="queue_full")

    def check_answer(self, num_bytes: int, what: str, hint: str) -> None:
        """Raises if the result of a request is larger than the limit: it is in memory as a whole."""
        if num_bytes > (limit := self.settings.max_answer_bytes):
            fact = f"the answer could have {num_bytes} bytes of {what}, the limit is {limit}"
            raise bad_request(f"{fact}; {hint}, or raise --max-answer-bytes", code="answer_too_large")

    def admit(self, num_requests: int, num_tokens: int = 0, caller: str = "") -> None:
        """Raises if the queue has no room for these requests."""
        if (error := self.no_room(num_requests, num_tokens, caller)) is not None:
            raise error

    async def encode(self, num_requests: int, size: int, function: Callable[[], T], caller: str = "") -> T:
        """Calls `function`, which tokenises prompts with `size` characters, where the queue has room for them. They
        count as waiting meanwhile."""
        self.admit(num_requests, caller=caller)
        with self.engine.load.encoding(num_requests, caller):
            return await self.off_loop(size, function)

    async def off_loop(self, size: int, function: Callable[[], T]) -> T:
        """Runs `function` on `size` characters outside the event loop. Raises where too many characters wait for that
        already; a text above the limit is accepted while no other waits."""
        if size >= LONG and OFFLOAD.size and OFFLOAD.size + size > _MAX_CHARS:
            self.counters.refused["queue_full"] += 1
            fact = f"{OFFLOAD.size} characters wait to be tokenised, the limit is {_MAX_CHARS}"
            raise HTTPException(429, f"{fact}; try again soon", retry_after=1, code="queue_full")
        return await OFFLOAD.run(size, function)


def _with_reserve(limit: int) -> int:
    """The limit of the queue for callers with nothing in it."""
    return limit + limit // 4
