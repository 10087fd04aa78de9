"""State: the shared state of one front end: engine, settings, keys, counters, and admission of requests."""

from __future__ import annotations

import itertools
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.base.files import locked
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.beam_search import BeamGrammars
from slipstream.front.prompts import LONG, TOKENIZER_THREADS, AnswerPieces
from slipstream.metrics.stats import SharedCounters, Traces
from slipstream.serve.http.server.access import Hosts, Keys
from slipstream.serve.http.server.batch_store import BatchService, error_code, transaction
from slipstream.serve.http.server.body import Bodies
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.stats import Counters, ServerStats

T = TypeVar("T")

log = logging.getLogger("slipstream.http")

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
        if size >= LONG and TOKENIZER_THREADS.size and TOKENIZER_THREADS.size + size > _MAX_CHARS:
            self.counters.refused["queue_full"] += 1
            fact = f"{TOKENIZER_THREADS.size} characters wait to be tokenised, the limit is {_MAX_CHARS}"
            raise HTTPException(429, f"{fact}; try again soon", retry_after=1, code="queue_full")
        return await TOKENIZER_THREADS.run(size, function)


def _with_reserve(limit: int) -> int:
    """The limit of the queue for callers with nothing in it."""
    return limit + limit // 4


# ResponseStore: responses and their conversations, in an SQLite database that all front ends share.
#
# The database is in memory: of this process with one front end, else a file in a folder of shared memory. Over a limit,
# the least recently used response of the caller that has most is dropped, so one caller cannot drop those of others.

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, used INT, size INT, body BLOB, messages BLOB, items BLOB) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, used, size);
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
"""


class StoredResponse(msgspec.Struct):
    owner: str  # the API key's digest
    body: bytes  # the response, as JSON
    messages: bytes  # of the conversation so far, the answer included, as JSON
    items: bytes  # the input of the request, as JSON

    @property
    def size(self) -> int:
        return len(self.body) + len(self.messages) + len(self.items)


class ResponseStore:
    def __init__(self, max_count: int, max_bytes: int, path: Path | None = None) -> None:
        """`path`: of the database that several front ends share."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._checkpoint_pages = 1000
        self._next_warning = 0.0  # monotonic seconds
        if path is None or max_count < 1:
            self._open(":memory:")
            return
        try:
            # SQLite does not wait for a process that sets WAL at the same time: the database is locked
            with locked(path.with_suffix(".lock")):
                self._fit(path)
                self._open(path)
        except (OSError, sqlite3.Error) as error:
            fact = f"stored responses of several front ends have no room in {path.parent}: {error}"
            raise InvalidOption(f"{fact}; {_MORE_ROOM}, or set --max-stored-responses 0") from None

    def _fit(self, path: Path) -> None:
        """Limits the bytes to what the folder has room for: a third, since SQLite writes changes to a second file."""
        own = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        room = (shutil.disk_usage(path.parent).free + own) // 3
        if room < self._max_bytes and not own:  # logged by one of the front ends
            fact = (
                f"stored responses have {room} bytes in {path.parent}, --max-stored-response-bytes is {self._max_bytes}"
            )
            log.warning("%s; %s", fact, _MORE_ROOM)
        self._max_bytes = min(self._max_bytes, room)
        self._checkpoint_pages = min(1000, max(1, room // 2**13))  # SQLite's default, or half of the room

    def _open(self, where: Path | str) -> None:
        self._db = sqlite3.connect(where, check_same_thread=False, isolation_level=None, timeout=30)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")  # it need not survive the machine
        self._db.execute(f"PRAGMA wal_autocheckpoint = {self._checkpoint_pages}")
        self._db.executescript(_SCHEMA)

    def add(self, id: str, response: StoredResponse) -> None:
        """Stores a response under a new id. One that is larger than the limit, or than the room in the folder that
        others share, is not stored."""
        if response.size > self._max_bytes or self._max_count < 1:
            return
        with self._while_full(f"response {id} is not stored"), transaction(self._db):
            row = (id, response.owner, response.size, response.body, response.messages, response.items)
            values = f"?, ?, {_NEXT_USE}, ?, ?, ?, ?"
            self._db.execute(f"INSERT INTO responses VALUES ({values})", row)
            while (most := self._over_limit()) is not None:
                oldest = f"SELECT id FROM responses WHERE owner = ({most}) ORDER BY used LIMIT 1"
                self._db.execute(f"DELETE FROM responses WHERE id = ({oldest})")

    def find(self, owner: str, id: str) -> StoredResponse | None:
        query = "SELECT owner, body, messages, items FROM responses WHERE id = ? AND owner = ?"
        row = self._db.execute(query, (id, owner)).fetchone()
        if row is not None:
            with self._while_full(f"the use of response {id} is not noted"), transaction(self._db):
                self._db.execute(f"UPDATE responses SET used = {_NEXT_USE} WHERE id = ?", (id,))
        return None if row is None else StoredResponse(*row)

    def delete(self, owner: str, id: str) -> bool:
        with transaction(self._db):
            return self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount > 0

    def close(self) -> None:
        self._db.close()

    @property
    def num_bytes(self) -> int:
        (total,) = self._db.execute("SELECT TOTAL(size) FROM responses").fetchone()
        return int(total)

    def __len__(self) -> int:
        (count,) = self._db.execute("SELECT COUNT(*) FROM responses").fetchone()
        return int(count)

    def _over_limit(self) -> str | None:
        """The query for the owner that has most of what is over its limit; None where both limits are kept."""
        for limit, used, measure in (
            (self._max_bytes, self.num_bytes, "SUM(size)"),
            (self._max_count, len(self), "COUNT(*)"),
        ):
            if used > limit:
                return f"SELECT owner FROM responses GROUP BY owner ORDER BY {measure} DESC LIMIT 1"
        return None

    @contextmanager
    def _while_full(self, consequence: str) -> Iterator[None]:
        """Around a change that may be left out where others have filled the shared memory. Logs it once a minute."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if error_code(error) != sqlite3.SQLITE_FULL:
                raise
            if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + 60.0
                log.warning("%s: shared memory is full; %s", consequence, _MORE_ROOM)


_MORE_ROOM = "give /dev/shm more room (docker run --shm-size), lower --max-stored-response-bytes"
_NEXT_USE = "(SELECT IFNULL(MAX(used), 0) + 1 FROM responses)"
