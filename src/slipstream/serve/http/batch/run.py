"""Runs the lines of a batch through the routes of this server, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from slipstream.base.errors import EngineDead
from slipstream.serve.http.app import App
from slipstream.serve.http.batch.lines import BatchLine, LineResponse, LineResult
from slipstream.serve.http.direct import Reply, call_route
from slipstream.serve.http.turns import is_failure

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
