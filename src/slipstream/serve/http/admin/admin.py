"""Admin routes: disabled unless the server has an admin key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import parse_qsl

import msgspec

from slipstream.base.errors import ModelNotFound
from slipstream.base.typed import Fields
from slipstream.front.router import control
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.request import Request, get, post, query_of
from slipstream.serve.http.server.response import Response, json_response

_REPLY_SECONDS = 10.0  # for the other front ends to reply


class Aborted(msgspec.Struct):
    aborted: int  # number of prompts, over all front ends


async def abort_requests(request: Request, body: None) -> Response:
    """Aborts all requests. Their responses have what was generated so far, and finish_reason abort."""
    state = request.state
    count = await state.engine.abort_all()
    state.counters.aborted["admin"] += count
    if state.settings.workers > 1:
        try:
            others = await asyncio.wait_for(state.engine.abort_others(), _REPLY_SECONDS)
        except TimeoutError:
            fact = (
                f"{count} requests of one front end were aborted, and the others did not reply in {_REPLY_SECONDS:g} s"
            )
            raise HTTPException(503, f"{fact}; try again, or see /health", code="abort_incomplete") from None
        state.counters.aborted["admin"] += others
        count += others
    return json_response(Aborted(count))


async def reset_prefix_cache(request: Request, body: None) -> Response:
    """Clears the prefix caches, for example before a measurement. Running requests keep the pages that they hold."""
    try:
        await asyncio.wait_for(request.state.engine.reset_prefix_cache(), _REPLY_SECONDS)
    except TimeoutError:
        fact = f"the engine did not reply in {_REPLY_SECONDS:g} s"
        raise HTTPException(503, f"{fact}; try again, or see /health", code="no_reply") from None
    return json_response({})


ROUTES = [
    post(
        "/abort_requests",
        abort_requests,
        "Abort all requests",
        response_model=Aborted,
        access="admin",
        needs_engine=False,
        uses_queue=False,
    ),
    post(
        "/reset_prefix_cache", reset_prefix_cache, "Forget cached prefixes of all models", access="admin",
        uses_queue=False,
    ),
]  # fmt: skip


# Admin routes that load and unload LoRA adapters: disabled without an admin key and without --lora-folders.


class LoadAdapterBody(Fields):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None  # if several models take adapters
    load_inplace: bool = False  # replace an adapter of this name


class UnloadAdapterBody(Fields):
    lora_name: str


async def load_lora_adapter(request: Request, body: LoadAdapterBody) -> Response:
    """Requests can name the adapter as their model from now on."""
    state = request.state
    _check_workers(request)
    request.field_names["lora_request"] = "lora_name"
    path = _allowed(body.lora_path, state.settings.lora_folders)
    state.engine.load_adapter(body.lora_name, path, base=body.base_model_name, replace=body.load_inplace)
    return Response(f"Success: LoRA adapter {body.lora_name!r} added successfully.".encode(), media_type=b"text/plain")


async def unload_lora_adapter(request: Request, body: UnloadAdapterBody) -> Response:
    _check_workers(request)
    try:
        request.state.engine.unload_adapter(body.lora_name)
    except ModelNotFound as error:
        raise HTTPException(404, str(error), param="lora_name", code="model_not_found") from None
    text = f"Success: LoRA adapter {body.lora_name!r} removed successfully."
    return Response(text.encode(), media_type=b"text/plain")


def _check_workers(request: Request) -> None:
    if request.state.settings.workers > 1:
        raise HTTPException(
            409,
            "each front end has its own list of adapters, and there are several; use --workers 1, or --lora-modules at "
            "start",
            code="several_front_ends",
        )


def _allowed(path: str, folders: list[str]) -> str:
    """The path, if it lies in one of the folders after links are followed."""
    if not folders:
        raise HTTPException(403, "loading adapters is disabled; start the server with --lora-folders to enable it")
    try:
        found = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise bad_request("lora_path is not a path; give a folder", "lora_path") from None
    if not any(found.is_relative_to(Path(folder).resolve()) for folder in folders):
        raise bad_request("lora_path is outside of the folders of --lora-folders; move the adapter there", "lora_path")
    return str(found)


ADAPTER_ROUTES = [
    post(
        "/v1/load_lora_adapter", load_lora_adapter, "Load a LoRA adapter", LoadAdapterBody, access="admin",
        uses_queue=False,
    ),
    post(
        "/v1/unload_lora_adapter", unload_lora_adapter, "Unload a LoRA adapter", UnloadAdapterBody, access="admin",
        uses_queue=False,
    ),
]  # fmt: skip


# Admin routes of vLLM that release the device memory of the engine and load weights again.


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class RpcBody(Fields):
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
SLEEP_ROUTES = [
    post("/sleep", sleep, "Release the device memory of weights and caches", **_HOW),
    post("/wake_up", wake_up, "Take back the device memory", **_HOW),
    get("/is_sleeping", is_sleeping, "Whether the engine sleeps", response_model=Sleeping, needs_engine=True, **_HOW),
    post("/collective_rpc", collective_rpc, "Read the weights again", RpcBody, response_model=RpcResults, **_HOW),
]
