"""Runs a POST route without HTTP: for the lines of a batch, which are request bodies in a file.

The endpoint, its limits and its errors are those of an HTTP request. The caller has checked the API key.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from slipstream.serve.http.app import App
from slipstream.serve.http.errors import aborted, as_http_error
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response
from slipstream.serve.http.turns import is_failure

log = logging.getLogger("slipstream.http")


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
