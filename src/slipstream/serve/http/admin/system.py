"""Routes about the server itself: health, readiness, load, version and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

import slipstream
from slipstream.front.router import read_record, read_steps
from slipstream.metrics.stats import FrontEnds, LaneStats
from slipstream.record.step_log import StepTimes, chrome_trace
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.request import Request, get, query_of, refused
from slipstream.serve.http.server.response import Response, StreamingResponse, event, json_response


class Health(msgspec.Struct):
    status: str  # ok, degraded while a front end or a replica is down or repeated work fails, or the failure
    stage: str | None = None  # of the start, until the engine is ready
    front_ends: FrontEnds | msgspec.UnsetType = msgspec.UNSET  # with several front ends
    failing: list[str] | msgspec.UnsetType = msgspec.UNSET  # tasks such as batches; the log has the reason


class ModelLoad(msgspec.Struct):
    """Load of one model, summed over its replicas."""

    model: str
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    steps: int = 0
    memory: dict[str, int] = {}  # planned bytes of weights, cache and other parts: an upper bound


class Load(msgspec.Struct):
    server_load: int  # open requests of all front ends; vLLM's name
    queued_requests: int  # prompts without a first output, in the front ends or the core; being tokenised included
    queued_tokens: int
    running: int  # samples in the core that have a row
    waiting: int  # samples in the core that wait for a row or for pages
    free_pages: int
    pages: int
    steps: int
    is_asleep: bool  # the engine is asleep or has no weights: no request can run
    models: list[ModelLoad]


class Version(msgspec.Struct):
    version: str


async def live(request: Request, body: None) -> Response:
    """Liveness: 503 where only a restart helps: the engine is lost, or has requests and sends nothing."""
    state = request.state
    if state.engine.failure is not None:
        return json_response(Health("the engine has ended"), 503)
    if state.stalled is not None:
        return json_response(Health(state.stalled), 503)
    return json_response(Health("ok", None if state.engine.is_ready else state.engine.stage))


async def health(request: Request, body: None) -> Response:
    """Readiness, as vLLM's: 200 where requests are accepted."""
    state = request.state
    if state.engine.failure is not None or state.stalled is not None:
        return await live(request, body)
    if state.draining:
        return json_response(Health("draining"), 503)
    if not state.engine.is_ready:
        return json_response(Health("starting", state.engine.stage), 503)
    front_ends = state.server_stats.front_ends()
    is_complete = front_ends is None or front_ends.running == front_ends.wanted
    is_complete = is_complete and all(replica.is_ready for replica in state.server_stats.replicas())
    counts = msgspec.UNSET if front_ends is None else front_ends
    failing = sorted(state.server_stats.read()[0].failing)
    text = "ok" if is_complete and not failing else "degraded"
    return json_response(Health(text, None, counts, failing or msgspec.UNSET))


async def load(request: Request, body: None) -> Response:
    front, lanes = request.state.server_stats.read()
    return json_response(
        Load(
            server_load=front.open_requests,
            queued_requests=front.queued_requests,
            queued_tokens=front.queued_tokens,
            running=sum(lane.num_running for lane in lanes),
            waiting=sum(lane.num_waiting for lane in lanes),
            free_pages=sum(lane.num_free_pages for lane in lanes),
            pages=sum(lane.num_pages for lane in lanes),
            steps=sum(lane.num_steps for lane in lanes),
            is_asleep=request.state.engine.pulse.is_asleep,
            models=_by_model(lanes),
        )
    )


def _by_model(lanes: Sequence[LaneStats]) -> list[ModelLoad]:
    found: dict[str, ModelLoad] = {}
    for lane in lanes:
        model = found.setdefault(lane.model, ModelLoad(lane.model))
        model.running += lane.num_running
        model.waiting += lane.num_waiting
        model.free_pages += lane.num_free_pages
        model.pages += lane.num_pages
        model.steps += lane.num_steps
        for part, count in lane.memory.items():
            model.memory[part] = model.memory.get(part, 0) + count
    return list(found.values())


async def version(request: Request, body: None) -> Response:
    return json_response(Version(slipstream.__version__))


async def metrics(request: Request, body: None) -> Response:
    text, kind = request.state.server_stats.text(request.header(b"accept") or "")
    return Response(text, media_type=kind.encode())


_PROBES = (
    ("/health", health, "Readiness"),
    ("/ready", health, "Readiness"),
    ("/ping", health, "Readiness, for SageMaker"),
    ("/livez", live, "Liveness"),
)
_AUDIO = ("speech", "transcriptions", "translations")

ROUTES = [
    *(
        get(path, run, text, response_model=Health, access="open", any_host=True, quiet=True)
        for path, run, text in _PROBES
    ),
    get("/load", load, "Open, queued and running requests", response_model=Load),
    get("/version", version, "Version of the server", response_model=Version),
    get("/metrics", metrics, "Metrics in Prometheus' format", quiet=True),
    *(refused(f"/v1/audio/{name}", "models read and write text only") for name in _AUDIO),
]


# Debug routes: the flight recorder's file, a trace of steps, and a live stream of steps.

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


DEBUG_ROUTES = [
    get("/debug/record", record, "The last steps, for slipstream replay", access="admin"),
    get("/debug/trace", trace, "A trace of the next seconds, for ui.perfetto.dev", needs_engine=True),
    get("/debug/timeline", timeline, "A live stream of steps", response_model=StepsEvent, needs_engine=True),
]
