"""Admin routes: disabled unless the server has an admin key."""

from __future__ import annotations

import asyncio

import msgspec

from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import post

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
