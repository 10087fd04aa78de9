"""BatchRunner: runs the stored batches, in one of the front ends.

The front end that holds a lock on a file in the store's folder is the runner. The lock ends with its process, and
another front end, or the next start of the server, continues: lines with a stored result are not run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from slipstream.base.errors import EngineDead
from slipstream.base.files import try_lock
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.batch_lines import (
    BatchLine,
    BatchLineError,
    InvalidLine,
    LineError,
    LineResponse,
    LineResult,
    read_line,
)
from slipstream.serve.http.server.batch_store import (
    BatchErrors,
    BatchObject,
    BatchService,
    StoreFull,
    StoreUnavailable,
)
from slipstream.serve.http.server.errors import aborted, as_http_error
from slipstream.serve.http.server.request import Request
from slipstream.serve.http.server.response import Response
from slipstream.serve.http.server.stats import is_failure

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("slipstream.http")

_POLL_SECONDS = 1.0  # batches may be created and cancelled through other front ends
_CLEAN_SECONDS = 60.0
_AGAIN_SECONDS = 5.0  # after a failure of the store
_MAX_RUNNING = 8  # batches at a time
_MAX_IN_FLIGHT = 256  # lines of all batches; at most half of the front end's queue, so that requests find room
_MAX_ERRORS = 100  # listed of a file
_TASK = "batches"  # its name in /health and /metrics
_LINE = re.compile(rb"\S[^\n]*")  # one that is not empty, without the space before it


class BatchRunner:
    def __init__(self, app: App, service: BatchService) -> None:
        self.app = app
        self.service = service
        self.store = service.store
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}  # by owner and id
        self._turns = app.state.counters.turns
        self._lock: int | None = None  # a file descriptor, while this front end is the runner
        self._next_clean = 0.0  # monotonic seconds
        self._in_flight = asyncio.Semaphore(max(1, min(_MAX_IN_FLIGHT, app.state.max_requests // 2)))

    async def run(self) -> None:
        """Runs batches until it is cancelled."""
        await self.app.state.engine.until_ready()
        try:
            while True:
                self.service.changed.clear()
                with self._turns.turn(_TASK):
                    if self._lock is not None or self._take_lock():
                        await self._turn()
                # not wait_for: Python 3.11's loses a cancellation that comes together with the change
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self.service.changed.wait()
        finally:
            await self.stop()
            if self._lock is not None:
                os.close(self._lock)

    async def stop(self) -> None:
        """Stops all batches. Lines without a result run again after the next start."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _take_lock(self) -> bool:
        file = os.open(self.store.folder / "runner.lock", os.O_WRONLY | os.O_CREAT, 0o600)
        if try_lock(file):
            self._lock = file
            return True
        os.close(file)
        return False

    async def _turn(self) -> None:
        if time.monotonic() >= self._next_clean:
            await self.service.run(self.store.delete_expired)
            self._next_clean = time.monotonic() + _CLEAN_SECONDS
        if not self.app.state.draining and self.app.state.engine.failure is None:
            await self._start_batches()

    async def _start_batches(self) -> None:
        """Starts open batches: the oldest of the owner with the fewest that run."""
        stored = await self.service.run(self.store.open_batches)
        self._running = {batch: task for batch, task in self._running.items() if not task.done()}
        waiting = [batch for batch in stored if batch not in self._running]
        counts = Counter(owner for owner, _ in self._running)
        while waiting and len(self._running) < _MAX_RUNNING:
            batch = min(waiting, key=lambda each: counts[each[0]])  # the first of equals is the oldest
            waiting.remove(batch)
            counts[batch[0]] += 1
            self._running[batch] = asyncio.get_running_loop().create_task(self._run_batch(*batch))

    async def _run_batch(self, owner: str, id: str) -> None:
        batch = _Batch(self.app, self.service, self._in_flight, owner, id)
        try:
            await batch.run()
        except (EngineDead, BatchStopped):
            pass  # continued after the next start
        except StoreFull as error:
            await batch.finish(_failed(BatchLineError("store_full", str(error))))
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("batch %s failed", id)
            await batch.finish(_failed(BatchLineError("internal_error", "internal error; see the server's log")))
        finally:
            self._turns.end(_TASK, id)
            self.service.changed.set()


class _Batch:
    """One batch from validation to its files of results."""

    def __init__(self, app: App, service: BatchService, in_flight: asyncio.Semaphore, owner: str, id: str) -> None:
        self.app = app
        self.service = service
        self.store = service.store
        self.turns = app.state.counters.turns
        self.in_flight = in_flight
        self.owner = owner
        self.id = id

    async def run(self) -> None:
        batch = await self._call(self.store.open_batch, self.owner, self.id)
        data = await self._call(self.store.content, self.owner, batch.input_file_id)
        if data is None:
            await self.finish(_failed(BatchLineError("file_not_found", "the input file was deleted")))
            return
        lines, errors = await asyncio.to_thread(check_lines, data, batch.endpoint)
        if errors:
            await self.finish(_failed(*errors))
            return
        indices = await self._call(self.store.line_indices, self.id)
        begun = await self._call(self.store.change_batch, self.owner, self.id, _begun(len(lines)))
        assert begun is not None, f"batch {self.id} is gone, which was open"
        end = "completed"
        if begun.status != "cancelling" and len(indices) < len(lines):
            task = asyncio.ensure_future(self._run_lines(data, lines, indices))
            try:
                end = await self._until_end(task, begun.expires_at)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        elif begun.status == "cancelling":
            end = "cancelled"
        rest = await self._expired_lines(data, lines) if end == "expired" else b""
        await self.finish(_ended(end), rest)

    async def _run_lines(self, data: bytes, lines: list[tuple[int, int]], kept: set[int]) -> None:
        async def remaining() -> AsyncIterator[tuple[int, BatchLine]]:
            for index, (start, end) in enumerate(lines):
                if index not in kept:
                    yield index, read_line(data[start:end])

        async def done(index: int, result: LineResult) -> None:
            line, ok = result.encode(), result.succeeded
            await self._call(self.store.add_result, self.owner, self.id, index, line, ok)

        await run_lines(self.app, remaining(), self.in_flight, f"batch {self.owner}", done)

    async def _until_end(self, task: asyncio.Future[None], expires_at: int) -> str:
        """Waits until all lines have results, or the batch was cancelled or has expired. Returns its final state."""
        deadline = time.monotonic() + expires_at - time.time()  # whatever is done to the clock meanwhile
        while True:
            await asyncio.wait([task], timeout=_POLL_SECONDS)
            if task.done():
                task.result()  # raises what stopped it
                return "completed"
            batch = await self._call(self.store.open_batch, self.owner, self.id)
            if batch.status == "cancelling":
                return "cancelled"
            if time.monotonic() >= deadline:
                return "expired"

    async def _expired_lines(self, data: bytes, lines: list[tuple[int, int]]) -> bytes:
        """Results for the lines that have none."""
        kept = await self._call(self.store.line_indices, self.id)
        error = LineError("batch_expired", "the request was not run before the completion window ended")

        def write() -> bytes:
            written = bytearray()
            for index, (start, end) in enumerate(lines):
                if index not in kept:
                    name = read_line(data[start:end]).custom_id
                    written += LineResult(f"batch_req_{self.id}_{index}", name, None, error).encode() + b"\n"
            return bytes(written)

        return await asyncio.to_thread(write)  # a file may have a million lines

    async def finish(self, change: Callable[[BatchObject], None], rest: bytes = b"") -> None:
        while True:  # the files of results need room, which a full disk does not have
            with self.turns.turn(_TASK, f"{self.id} finish"):
                return await self.service.run(self.store.finish, self.owner, self.id, change, rest)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the store, again and again while it cannot be used: what is to be stored is kept. Each
        method is a part of the turns: one that reads works while another process writes."""
        while True:
            with self.turns.turn(_TASK, f"{self.id} {call.__name__}", StoreUnavailable):
                return await self.service.run(call, *args, **kwargs)
            await asyncio.sleep(_AGAIN_SECONDS)


def check_lines(data: bytes, endpoint: str) -> tuple[list[tuple[int, int]], list[BatchLineError]]:
    """Returns the offsets of the lines, and what is wrong with them."""
    lines: list[tuple[int, int]] = []
    errors: list[BatchLineError] = []
    seen: set[str] = set()
    for found in _LINE.finditer(data):  # not split, which would make a list of all lines, empty ones too
        lines.append(found.span())
        try:
            line = read_line(found[0], endpoint)
            if line.custom_id in seen:
                raise InvalidLine("duplicate_custom_id", f"custom_id {line.custom_id!r:.100} is given twice")
            seen.add(line.custom_id)
        except InvalidLine as error:
            errors.append(error.at(data.count(b"\n", 0, found.start()) + 1))
            if len(errors) == _MAX_ERRORS:
                break
    if not lines:
        errors.append(BatchLineError("empty_file", "the file has no lines; give one request per line"))
    return lines, errors


def _begun(total: int) -> Callable[[BatchObject], None]:
    def change(batch: BatchObject) -> None:
        batch.request_counts.total = total
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", int(time.time())

    return change


def _ended(status: str) -> Callable[[BatchObject], None]:
    def change(batch: BatchObject) -> None:
        now = int(time.time())
        batch.status = "cancelled" if batch.status == "cancelling" else status
        batch.finalizing_at = now
        if batch.status == "cancelled":
            batch.cancelled_at = now
        elif batch.status == "expired":
            batch.expired_at = now
            batch.request_counts.failed = batch.request_counts.total - batch.request_counts.completed
        else:
            batch.completed_at = now

    return change


def _failed(*errors: BatchLineError) -> Callable[[BatchObject], None]:
    def change(batch: BatchObject) -> None:
        batch.status, batch.failed_at = "failed", int(time.time())
        batch.errors = BatchErrors(list(errors))

    return change


# Runs the lines of a batch through the routes of this server, a bounded number at a time.

_MAX_PAUSE = 5.0  # seconds until a line that failed for a time is tried again

Done = Callable[[int, LineResult], Awaitable[None]]
"""Stores the result of the line at this index of the input."""


class BatchStopped(Exception):
    """The server is shutting down: the lines that have no result stay for the next start."""


async def run_lines(
    app: App, lines: AsyncIterator[tuple[int, BatchLine]], in_flight: asyncio.Semaphore, caller: str, done: Done
) -> None:
    """Runs all lines; `in_flight` limits how many run at once. Raises EngineDead or BatchStopped if the engine or the
    server ends; lines without a result were then not passed to `done`."""
    failures: list[BaseException] = []

    async def run_one(index: int, line: BatchLine) -> None:
        try:
            await done(index, await _run_line(app, line, caller))
        except BaseException as error:
            if not is_failure(error):
                raise
            failures.append(error)
        finally:
            in_flight.release()

    async with asyncio.TaskGroup() as group:
        try:
            async for index, line in lines:
                await in_flight.acquire()
                if failures:
                    in_flight.release()
                    break
                group.create_task(run_one(index, line))
        except Exception as error:  # of reading the lines; those that run are finished first
            failures.append(error)
    if failures:
        raise failures[0]


async def _run_line(app: App, line: BatchLine, caller: str) -> LineResult:
    request_id = f"batch_req_{app.state.new_id()}"
    while True:
        reply = await call_route(app, line.url, line.body, request_id, caller)
        if reply.code == "engine_dead":
            raise EngineDead("the engine has ended, with lines of the batch not finished")
        if reply.code == "draining":
            raise BatchStopped
        if not _is_temporary(reply):
            break
        await asyncio.sleep(min(reply.retry_after or _MAX_PAUSE, _MAX_PAUSE))
    return LineResult(request_id, line.custom_id, LineResponse(reply.status, request_id, msgspec.Raw(reply.body)))


def _is_temporary(reply: Reply) -> bool:
    """Whether the request failed for the state of the server (full, asleep, all requests aborted), and not for its own
    sake."""
    return reply.status == 429 or (
        reply.status == 503 and (reply.retry_after is not None or reply.code == "engine_asleep")
    )


# Runs a POST route without HTTP: for the lines of a batch, which are request bodies in a file.
#
# The endpoint, its limits and its errors are those of an HTTP request. The caller has checked the API key.


class Reply(NamedTuple):
    status: int
    body: bytes  # JSON, on one line
    code: str | None = None  # of an error
    retry_after: float | None = None  # seconds, of a temporary error


async def call_route(app: App, path: str, body: bytes, request_id: str, caller: str) -> Reply:
    """Returns the status and the body of the response. `caller`: for fair scheduling, as in `Request`."""
    route = app.find_route("POST", path)
    request = Request(app.state, request_id, (), {}, b"", caller, in_batch=True)
    reply: Reply
    try:
        app.state.check_ready()
        response = await route.endpoint(request, app.decode(route, body))
        assert isinstance(response, Response), "a streamed response cannot be part of a batch"
        if any(sample.finish_reason == "abort" for state in request.request_states for sample in state.samples):
            # an admin ended all requests: what this one has is no result
            raise aborted()
        parts = response.body
        reply = Reply(response.status_code, parts if isinstance(parts, bytes) else b"".join(parts))
    except BaseException as error:
        if not is_failure(error):
            raise
        failure = as_http_error(error, request_id, request.field_names)
        if failure.param is None and failure.status == 400:
            failure.param = request.input_field
        if failure.status == 500:
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
        if route.convert_error is not None:
            failure = route.convert_error(failure)
        reply = Reply(failure.status, failure.body(), failure.code, failure.retry_after)
    app.state.counters.requests[path, reply.status] += 1
    return reply
