"""Route: one route of the server. Dispatch, access control and the OpenAPI document are generated from the routes.

A module of routes has a list `ROUTES`; `table.py` lists the modules.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from slipstream.serve.http.auth import Access
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, StreamingResponse

Endpoint = Callable[[Request, Any], Awaitable[Response | StreamingResponse]]
"""Called with the request and the decoded body: None if the route has none, the parts by name of a form."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str  # in Starlette's syntax: /v1/models/{model:path}
    endpoint: Endpoint
    summary: str
    body: Any = None  # type of the JSON body
    form: Any = None  # type with the fields of a form (multipart/form-data), which is an upload
    response_model: Any = None  # type of the JSON response, for the OpenAPI document
    access: Access = "user"
    convert_error: Callable[[HTTPException], HTTPException] | None = None  # for an API with its own error format
    error_model: Any = None  # type of such errors, for the OpenAPI document
    any_content_type: bool = False  # the body is JSON whatever its header says, as Ollama's clients send it
    reads_body: bool = True  # of a POST request; False for a route that only refuses
    any_host: bool = False  # do not check the Host header
    quiet: bool = False  # for probes and scrapers: logged at level debug
    needs_engine: bool = True  # watched for disconnects and deadlines, and refused until the engine is ready
    uses_queue: bool = True  # sends requests to the engine: refused while the queue is full


def get(path: str, endpoint: Endpoint, summary: str, **more: Any) -> Route:
    return Route(
        method="GET",
        path=path,
        endpoint=endpoint,
        summary=summary,
        **({"needs_engine": False, "uses_queue": False} | more),
    )


def delete(path: str, endpoint: Endpoint, summary: str, **more: Any) -> Route:
    return Route(
        method="DELETE", path=path, endpoint=endpoint, summary=summary, needs_engine=False, uses_queue=False, **more
    )


def post(path: str, endpoint: Endpoint, summary: str, body: Any = None, **more: Any) -> Route:
    return Route(method="POST", path=path, endpoint=endpoint, summary=summary, body=body, **more)


def refused(path: str, hint: str, *, method: str = "POST", **more: Any) -> Route:
    """Returns a route that clients know and that this server does not have: its error says so by name."""

    async def refuse(request: Request, body: None) -> Response:
        raise HTTPException(400, f"{path} is not supported: {hint}", code="unsupported_route", closes=True)

    how = {"needs_engine": False, "uses_queue": False, "reads_body": False} | more
    return Route(method=method, path=path, endpoint=refuse, summary=f"Not supported: {hint}", **how)
