"""Route: one door of the server, described once. Dispatch, keys and the OpenAPI page are made from the list of them.

A file of routes has a list `ROUTES`; the server opens those of the files named in `table.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from slipstream.serve.http.auth import Access
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import HttpError
from slipstream.serve.http.reply import EventReply, Reply

Handler = Callable[[Call, Any], Awaitable[Reply | EventReply]]
"""Gets the call, and the decoded body where the route has one, else None."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str  # as starlette writes them: /v1/models/{model:path}
    handler: Handler
    summary: str
    body: Any = None  # type of the JSON body
    answer: Any = None  # type of the JSON answer, for the docs
    access: Access = "user"
    failed: Callable[[HttpError], HttpError] | None = None  # its errors in other words than OpenAI's
    failure: Any = None  # their type, for the docs
    any_host: bool = False  # answered whatever its Host header says
    quiet: bool = False  # asked every few seconds by probes and scrapers: not in the log above debug
    waits: bool = True  # for the engine: watched for disconnects, deadlines, and refused while it is not ready
    queues: bool = True  # asks the engine for something: refused while its queue is full


def get(path: str, handler: Handler, summary: str, **more: Any) -> Route:
    return Route(
        method="GET", path=path, handler=handler, summary=summary, **({"waits": False, "queues": False} | more)
    )


def post(path: str, handler: Handler, summary: str, body: Any = None, **more: Any) -> Route:
    return Route(method="POST", path=path, handler=handler, summary=summary, body=body, **more)
