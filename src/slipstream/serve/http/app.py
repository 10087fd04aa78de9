"""App: the ASGI application. Finds the route, checks the key, reads the body, and ends what nobody waits for any more.

There is no framework between the server and the handlers: a dictionary finds the route and msgspec decodes the body
straight from its bytes, which is most of what a short request costs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import HttpError, as_http_error, bad_request
from slipstream.serve.http.reply import DONE, EventReply, Reply
from slipstream.serve.http.routes import Route
from slipstream.serve.http.state import State
from slipstream.serve.http.trace import record_call
from slipstream.serve.http.watch import ClientGone, Watch

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("slipstream.http")

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events spoils the stream
]


class App:
    def __init__(self, state: State, routes: Sequence[Route]) -> None:
        self.state = state
        self.routes = routes
        self._decoders = {id(route): msgspec.json.Decoder(route.body) for route in routes if route.body is not None}
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], Route]] = []
        for route in routes:
            if "{" in route.path:
                self._patterns.append((_pattern(route.path), route))
            else:
                self._exact.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, and the start is not uvicorn's
        headers = scope["headers"]
        request_id = _own_id(headers) or self.state.new_id()
        name, status, began = "unknown", 500, time.perf_counter()
        response = _Response(send, request_id)
        route: Route | None = None
        call: Call | None = None
        try:
            route, params = self._find(scope["method"], scope["path"])
            name = route.path
            self.state.keys.check(route.access, headers)
            call = Call(self.state, request_id, headers, params, scope["query_string"])
            body = await self._read(route, headers, receive) if route.method == "POST" else None
            if route.waits:
                self.state.check_ready()
                with Watch(receive, self._seconds(call)):
                    status = await response.answer(await route.handler(call, body))
            else:
                status = await response.answer(await route.handler(call, body))
        except ClientGone as gone:
            status = 499
            self.state.counters.aborted[gone.cause] += 1
        except Exception as error:
            failure = as_http_error(error, request_id)
            if failure.status == 500:
                log.exception("request %s failed", request_id, extra={"request_id": request_id})
            if failure.code == "deadline":
                self.state.counters.aborted["deadline"] += 1
            if route is not None and route.failed is not None:
                failure = route.failed(failure)
            status = failure.status
            await response.fail(failure)
        finally:
            self.state.counters.requests[name, status] += 1
            if self.state.traces is not None and call is not None:
                record_call(self.state.traces, call, scope["method"], name, status, time.perf_counter() - began)
            if log.isEnabledFor(logging.INFO):
                seconds = time.perf_counter() - began
                facts = {"request_id": request_id, "method": scope["method"], "route": name, "status": status}
                log.info("%s %s %s %d %.3f s", *facts.values(), seconds, extra=facts | {"seconds": round(seconds, 6)})

    def _find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        found = self._exact.get(path)
        if found is not None:
            route = found.get("GET" if method == "HEAD" else method)
            if route is None:
                raise HttpError(405, f"{path} takes {' or '.join(found)}, not {method}")
            return route, {}
        for pattern, route in self._patterns:
            if (match := pattern.fullmatch(path)) and route.method == ("GET" if method == "HEAD" else method):
                return route, match.groupdict()
        raise HttpError(404, "there is no such route; /docs lists them")

    async def _read(self, route: Route, headers: Sequence[tuple[bytes, bytes]], receive: Receive) -> Any:
        limit = self.state.settings.max_body_bytes
        kind = b""
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise HttpError(413, f"the body has {int(value)} bytes, {limit} are the most; send less at once")
            if name == b"content-type":
                kind = value
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body = body + message["body"] if body else message["body"]
            more = message["more_body"]
            if len(body) > limit:
                raise HttpError(413, f"the body has more than {limit} bytes; send less at once")
        decoder = self._decoders.get(id(route))
        if decoder is None:
            return None
        # browsers ask before they send this type to a strange place, and send any other without asking
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            raise HttpError(415, "the body must be JSON; send the header Content-Type: application/json")
        return _decode(decoder, body)

    def _seconds(self, call: Call) -> float | None:
        limit = self.state.settings.request_timeout
        given = call.header(b"x-request-timeout")
        if given is None:
            return limit
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < 1e9:
            raise bad_request(f"X-Request-Timeout is {given!r}; give a number of seconds above 0")
        return seconds if limit is None else min(seconds, limit)


class _Response:
    """Writes an answer, whole or in events, and an error wherever the answer has come to."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._id = (b"x-request-id", request_id.encode())
        self._begun = False

    async def answer(self, reply: Reply | EventReply) -> int:
        if isinstance(reply, Reply):
            await self._whole(reply.status, reply.content_type, reply.body, list(reply.headers))
            return reply.status
        parts = reply.parts
        try:
            async for part in parts:
                if not self._begun:  # not before there is something to say: until then it may fail with a status
                    self._begun = True
                    headers = [*_EVENT_HEADERS, self._id]
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            await parts.aclose()  # type: ignore[attr-defined]
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200

    async def fail(self, error: HttpError) -> None:
        if not self._begun:
            await self._whole(error.status, b"application/json", error.body(), error.headers())
            return
        body = b"data: " + error.body() + b"\n\n" + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _whole(self, status: int, kind: bytes, body: bytes, more: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), self._id, *more]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        param = place.strip("`.") or None
        if text.startswith("Object contains unknown field"):
            param = ".".join(filter(None, (param, text.split("`")[1])))
            raise bad_request(f"there is no field {param}; leave it out", param=param) from None
        raise bad_request(f"{param or 'the body'}: {text}", param=param) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise bad_request("the body is nested too deep") from None


_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def _own_id(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The caller's name for its request, if it may stand in a log and a header."""
    for name, value in headers:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return None


def _pattern(path: str) -> re.Pattern[str]:
    """`{name}` is one part of a path, `{name:path}` the rest of it."""
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    text = re.escape(parts[0])
    for name, rest, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if rest else '[^/]+'})" + re.escape(after)
    return re.compile(text)
