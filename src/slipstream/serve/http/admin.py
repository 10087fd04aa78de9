"""Admin routes: closed unless the server has an admin key."""

from __future__ import annotations

import asyncio

import msgspec

from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import HttpError
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import post

_SECONDS = 10.0  # for the other front ends to answer


class Aborted(msgspec.Struct):
    aborted: int  # prompts, of all front ends


async def abort_requests(call: Call, body: None) -> Reply:
    """Streams end with what there is and finish_reason abort; others get their answer so."""
    state = call.state
    count = await state.engine.abort_all()
    state.counters.aborted["admin"] += count
    if state.settings.workers > 1:
        try:
            others = await asyncio.wait_for(state.engine.abort_others(), _SECONDS)
        except TimeoutError:
            fact = f"{count} requests of one front end were ended, and the others did not answer in {_SECONDS:g} s"
            raise HttpError(503, f"{fact}; ask again, or see /health", code="abort_incomplete") from None
        state.counters.aborted["admin"] += others
        count += others
    return json_reply(Aborted(count))


ROUTES = [
    post(
        "/abort_requests",
        abort_requests,
        "End everything under way",
        answer=Aborted,
        access="admin",
        waits=False,
        queues=False,
    ),
]
