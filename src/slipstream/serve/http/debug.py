"""Debug routes: the flight recorder's file, a trace of steps, and a live stream of steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec

from slipstream.front.router import read_record, read_steps
from slipstream.record.step_log import StepTimes, chrome_trace
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.query import query_of
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, StreamingResponse, event
from slipstream.serve.http.routes import get

_REPLY_SECONDS = 10.0
_MAX_TRACE = 60.0  # seconds
_PERIOD = 0.25  # seconds between two events of the timeline
_CONTENT = b"application/octet-stream"
_FIELDS = StepTimes.__struct_fields__


class StepsEvent(msgspec.Struct):
    """An event of the timeline. The first one has no steps."""

    models: list[str]
    fields: tuple[str, ...]  # names of the values of a step
    now: float  # the server's clock
    steps: list[StepTimes]


async def record(request: Request, body: None) -> Response:
    """The last steps of a model, for `slipstream replay`. They have the token ids of users' prompts."""
    query = query_of(request, "redact", "model")
    redact = query.get("redact", "0")
    if redact not in ("0", "1"):
        raise bad_request(f"redact is {redact[:20]!r}; give 0, or 1 to leave out token ids and texts", "redact")
    name = request.state.engine.model(query.get("model") or None).base_name
    try:
        data = await asyncio.wait_for(read_record(request.state.engine, name, redact=redact == "1"), _REPLY_SECONDS)
    except TimeoutError:
        fact = f"the engine did not reply in {_REPLY_SECONDS:g} s"
        raise HTTPException(503, f"{fact}; try again, or see /health", code="no_reply") from None
    name = f"attachment; filename=record-{time.strftime('%Y%m%d-%H%M%S')}.slipstream"
    return Response(data, media_type=_CONTENT, headers=((b"content-disposition", name.encode()),))


async def trace(request: Request, body: None) -> Response:
    """Logs all steps for some seconds and returns them as a trace, which ui.perfetto.dev opens."""
    text = query_of(request, "seconds").get("seconds", "5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _MAX_TRACE:
        raise bad_request(f"seconds is {text[:20]!r}; give a number above 0, at most {_MAX_TRACE:g}", "seconds")
    first = (await read_steps(request.state.engine, -1)).next
    await asyncio.sleep(seconds)
    table = await read_steps(request.state.engine, first)
    return Response(chrome_trace(table.models, table.steps))


async def timeline(request: Request, body: None) -> StreamingResponse:
    """A stream of steps, several times per second. The core logs steps only while such a stream is read."""
    query_of(request)
    return StreamingResponse(_events(request))


async def _events(request: Request) -> AsyncIterator[bytes]:
    engine, since = request.state.engine, -1
    while not request.state.draining:
        table = await read_steps(engine, since)
        yield event(StepsEvent(table.models, _FIELDS, time.time(), table.steps))
        since = table.next
        await asyncio.sleep(_PERIOD)


ROUTES = [
    get("/debug/record", record, "The last steps, for slipstream replay", access="admin"),
    get("/debug/trace", trace, "A trace of the next seconds, for ui.perfetto.dev", needs_engine=True),
    get("/debug/timeline", timeline, "A live stream of steps", response_model=StepsEvent, needs_engine=True),
]
