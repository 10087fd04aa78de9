"""Admin routes of vLLM that release the device memory of the engine and load weights again."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec

from slipstream.front.router import control
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.query import query_of
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import get, post


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class RpcBody(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: list[str] = []
    kwargs: dict[str, str] = {}
    timeout: float | None = None  # vLLM's; the call has no timeout


class RpcResults(msgspec.Struct):
    results: list[None]


async def sleep(request: Request, body: None) -> Response:
    """Aborts all requests, or keeps them until wake_up, and releases memory. New requests are refused meanwhile."""
    query = query_of(request, "level", "mode")
    level, mode = query.get("level", "1"), query.get("mode", "abort")
    if level not in ("0", "1", "2"):
        raise bad_request(f"level is {level[:20]!r}; give 0, 1 or 2", "level")
    if mode not in ("abort", "keep"):
        raise bad_request(f"mode is {mode[:20]!r}; give abort or keep", "mode")
    engine = request.state.engine
    if mode == "abort":
        count = await engine.abort_all()
        if request.state.settings.workers > 1:
            count += await engine.abort_others()
        request.state.counters.aborted["admin"] += count
    await control(engine, "sleep", level=int(level))
    return json_response({})


async def wake_up(request: Request, body: None) -> Response:
    query_of(request, "tags")
    tags = [value for _, value in parse_qsl(request.query_string.decode("latin-1"), keep_blank_values=True)]
    await control(request.state.engine, "wake_up", tags=tags or None)
    return json_response({})


async def is_sleeping(request: Request, body: None) -> Response:
    return json_response(Sleeping(await control(request.state.engine, "ask")))


async def collective_rpc(request: Request, body: RpcBody) -> Response:
    """Only the method reload_weights: reads the model's files again, after sleep of level 2 for example."""
    if body.method != "reload_weights" or body.args or body.kwargs:
        raise bad_request(
            f"method is {body.method[:50]!r}; give reload_weights without arguments, the only one that can be called",
            "method",
        )
    await control(request.state.engine, "update_weights")
    return json_response(RpcResults([None]))


_HOW = {"access": "admin", "uses_queue": False}
ROUTES = [
    post("/sleep", sleep, "Release the device memory of weights and caches", **_HOW),
    post("/wake_up", wake_up, "Take back the device memory", **_HOW),
    get("/is_sleeping", is_sleeping, "Whether the engine sleeps", response_model=Sleeping, needs_engine=True, **_HOW),
    post("/collective_rpc", collective_rpc, "Read the weights again", RpcBody, response_model=RpcResults, **_HOW),
]
