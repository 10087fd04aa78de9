"""App: the ASGI application. Finds the route, checks the key, reads the body, and ends what nobody waits for any more.

There is no framework between the server and the handlers: a dictionary finds the route and msgspec decodes the body
straight from its bytes, which is most of what a short request costs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

import msgspec

from slipstream.serve.http.auth import Headers
from slipstream.serve.http.call import Address, Call
from slipstream.serve.http.errors import HttpError, as_http_error, bad_request, misfit
from slipstream.serve.http.response import Receive, Response, Send
from slipstream.serve.http.routes import Route
from slipstream.serve.http.state import State
from slipstream.serve.http.trace import describe_engine_requests, record_call
from slipstream.serve.http.watch import ClientGone, Watch

log = logging.getLogger("slipstream.http")


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
        response = Response(send, request_id, self.state.settings.stream_keep_alive)
        route: Route | None = None
        call: Call | None = None
        try:
            route, params = self._find(scope["method"], scope["path"])
            name = route.path
            if not route.any_host:
                self.state.hosts.check(headers)
            self.state.keys.check(route.access, headers)
            # one connection carries one request at a time, so where there is none to go by each request stands alone
            caller = self.state.keys.caller(headers) or _connection(scope) or request_id
            call = Call(self.state, request_id, headers, params, scope["query_string"], caller)
            if route.queues:
                self.state.admit(1, caller=caller)  # before it is read: whatever it says, there is no room for it
            seconds = self._seconds(call) if route.waits else None
            body = await self._read(route, headers, receive, seconds) if route.method == "POST" else None
            if route.waits:
                self.state.check_ready()
                left = None if seconds is None else seconds - (time.perf_counter() - began)
                with Watch(receive, seconds, left):
                    status = await response.answer(await route.handler(call, body))
            else:
                status = await response.answer(await route.handler(call, body))
        except ClientGone as gone:
            status = 499
            self.state.counters.aborted[gone.cause] += 1
        except Exception as error:
            status = await self._fail(error, request_id, route, call, response)
        finally:
            seconds = time.perf_counter() - began
            if self.state.traces is not None and call is not None:
                record_call(self.state.traces, call, scope["method"], name, status, seconds)
            self._count(request_id, scope["client"], scope["method"], name, status, seconds, route)
            if call is not None and call.request_states and log.isEnabledFor(logging.DEBUG):
                log.debug("request %s: %s", request_id, describe_engine_requests(call))

    async def _fail(
        self, error: Exception, request_id: str, route: Route | None, call: Call | None, response: Response
    ) -> int:
        """Answers with the error; returns its status. Not in the frame that caught it: an exception that a variable of
        its own traceback names is kept, and the body with it, until the collector comes."""
        failure = as_http_error(error, request_id, call.names if call is not None else {})
        if failure.param is None and failure.status == 400 and call is not None:
            failure.param = call.input
        if failure.status == 500:
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %d, %s", request_id, failure.status, failure.message)
        if failure.code == "deadline":
            self.state.counters.aborted["deadline"] += 1
        if route is not None and route.failed is not None:
            failure = route.failed(failure)
        await response.fail(failure)
        return failure.status

    def refusal(self, method: str, path: str, headers: Headers, client: Address | None) -> tuple[HttpError, str] | None:
        """The answer to a request for which there is no room, on its head alone, and its id.

        None lets it in: there is room, or the route has another answer, or there is more to be found wrong with it.
        """
        if not self.state.is_full or self.state.traces is not None:
            return None
        began = time.perf_counter()
        route = self._exact.get(path, {}).get(method)
        if route is None or not route.queues or not self.state.hosts.allow(headers):
            return None
        try:
            self.state.keys.check(route.access, headers)
        except HttpError:
            return None
        error = self.state.no_room()
        assert error is not None, "a full queue has no room"
        if route.failed is not None:
            error = route.failed(error)
        request_id = _own_id(headers) or self.state.new_id()
        self._count(request_id, client, method, path, error.status, time.perf_counter() - began, route)
        return error, request_id

    def _count(
        self,
        request_id: str,
        client: Address | None,
        method: str,
        name: str,
        status: int,
        seconds: float,
        route: Route | None,
    ) -> None:
        self.state.counters.requests[name, status] += 1
        level = logging.DEBUG if route is not None and route.quiet else logging.INFO
        if log.isEnabledFor(level):
            facts = {"request_id": request_id, "client": _shown(client), "method": method, "route": name}
            facts |= {"status": status, "seconds": round(seconds, 6)}  # type: ignore[dict-item]
            log.log(level, "%s %s %s %s %d %.3f s", *facts.values(), extra=facts)

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

    async def _read(self, route: Route, headers: Headers, receive: Receive, seconds: float | None) -> Any:
        body = await self.state.bodies.read(headers, receive, seconds)
        decoder = self._decoders.get(id(route))
        if decoder is None:
            if body.strip() not in (b"", b"{}"):
                raise bad_request(f"{route.path} takes no body; send none")
            return None
        kind = next((value for name, value in headers if name == b"content-type"), b"")
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
            raise bad_request(f"X-Request-Timeout is {given!r}; give a number of seconds above 0", "X-Request-Timeout")
        return seconds if limit is None else min(seconds, limit)


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise misfit(error) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    except UnicodeDecodeError:  # msgspec checks the encoding of a string only when it makes one
        raise bad_request(f"the body is not UTF-8{_bad_byte(body)}; send JSON encoded as UTF-8") from None
    except RecursionError:
        raise bad_request("the body is nested too deep") from None


def _bad_byte(body: bytes) -> str:
    """Which byte breaks the encoding. msgspec counts from the start of the string that holds it."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f" (byte {error.start})"
    return ""


def _shown(client: Address | None) -> str:
    """The address that connected to us: of a proxy, where there is one."""
    if client is None:
        return "unix"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def _own_id(headers: Headers) -> str | None:
    """The caller's name for its request, if it may stand in a log and a header."""
    for name, value in headers:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return None


def _connection(scope: MutableMapping[str, Any]) -> str | None:
    client = scope.get("client")  # None for a unix socket
    return f"{client[0]}:{client[1]}" if client else None


def _pattern(path: str) -> re.Pattern[str]:
    """`{name}` is one part of a path, `{name:path}` the rest of it."""
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    text = re.escape(parts[0])
    for name, rest, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if rest else '[^/]+'})" + re.escape(after)
    return re.compile(text)
