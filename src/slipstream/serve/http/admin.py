"""Admin routes: closed unless the server has an admin key."""

from __future__ import annotations

import msgspec

from slipstream.serve.http.call import Call
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import post


class Aborted(msgspec.Struct):
    aborted: int  # prompts, of this front end


async def abort_requests(call: Call, body: None) -> Reply:
    """Streams end with what there is and finish_reason abort; others get their answer so."""
    count = await call.state.engine.abort_all()
    call.state.counters.aborted["admin"] += count
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
