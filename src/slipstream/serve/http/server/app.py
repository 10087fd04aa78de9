"""App: the ASGI application. Dispatches to routes, checks access, reads and decodes the body, and writes errors.

Dispatch is a dictionary lookup, and msgspec decodes the body from its bytes. With Starlette's Request, Response and
Router instead, a completion took 9 % more CPU time, an embedding 16 % and a streamed token 29 %.
"""

from __future__ import annotations

import logging
import re
import time
from codecs import BOM_UTF8
from collections.abc import MutableMapping, Sequence
from typing import Any

import msgspec

from slipstream.front.request_state import GenerationRequestState
from slipstream.metrics.stats import Traces
from slipstream.params.sampling import SamplingParams
from slipstream.params.values import MAX_DEPTH, MAX_HOLDERS, is_deep_json, is_wide_json
from slipstream.serve.http.server.access import Headers
from slipstream.serve.http.server.body import ClientDisconnect, Watch, check_origin, read_form
from slipstream.serve.http.server.error_formats import in_format_of
from slipstream.serve.http.server.errors import HTTPException, as_http_error, as_type, bad_request
from slipstream.serve.http.server.request import Address, Request, Route
from slipstream.serve.http.server.response import Receive, ResponseWriter, Send
from slipstream.serve.http.server.state import State
from slipstream.serve.http.server.stats import is_failure

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
            return  # no websockets and no lifespan
        headers = scope["headers"]
        request_id = _own_id(headers) or self.state.new_id()
        name, status, began = "unknown", 500, time.perf_counter()
        keep_alive, has_no_body = self.state.settings.stream_keep_alive, scope["method"] == "HEAD"
        writer = ResponseWriter(send, request_id, keep_alive, has_no_body=has_no_body)
        route: Route | None = None
        request: Request | None = None
        try:
            route, params = self._match(scope["method"], scope["path"])
            name = route.path
            if not route.any_host:
                self.state.hosts.check(headers)
            self.state.keys.check(route.access, headers)
            # fair scheduling by key, else by connection, else (on a unix socket) by request
            caller = self.state.keys.caller(headers) or _connection(scope) or request_id
            request = Request(self.state, request_id, headers, params, scope["query_string"], caller)
            if route.uses_queue:
                self.state.admit(1, caller=caller)  # before the body is read
            seconds = self._seconds(request) if route.needs_engine else None
            body = await self._read(route, headers, receive, seconds) if self._reads_body(route) else None
            if route.needs_engine:
                self.state.check_ready()
                left = None if seconds is None else seconds - (time.perf_counter() - began)
                with Watch(receive, seconds, left):
                    status = await writer.write(await route.endpoint(request, body))
            else:
                status = await writer.write(await route.endpoint(request, body))
        except ClientDisconnect as gone:
            status = 499
            self.state.counters.aborted[gone.cause] += 1
        except BaseException as error:  # panics of native code are no Exceptions
            if not is_failure(error):
                raise
            status = await self._fail(error, request_id, route, request, writer)
        finally:
            seconds = time.perf_counter() - began
            if self.state.traces is not None and request is not None:
                record_call(self.state.traces, request, scope["method"], name, status, seconds)
            self._count(request_id, scope["client"], scope["method"], name, status, seconds, route)
            if request is not None and request.request_states and log.isEnabledFor(logging.DEBUG):
                log.debug("request %s: %s", request_id, describe_engine_requests(request))

    async def _fail(
        self,
        error: BaseException,
        request_id: str,
        route: Route | None,
        request: Request | None,
        writer: ResponseWriter,
    ) -> int:
        """Writes the error and returns its status. A function of its own, because a local variable that refers to the
        exception in the frame that caught it is a reference cycle, which would keep the body in memory."""
        failure = as_http_error(error, request_id, request.field_names if request is not None else {})
        if failure.param is None and failure.status == 400 and request is not None:
            failure.param = request.input_field
        if failure.status == 500:
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %d, %s", request_id, failure.status, failure.message)
        if failure.code == "deadline":
            self.state.counters.aborted["deadline"] += 1
        if route is not None and route.convert_error is not None:
            failure = route.convert_error(failure)
        await writer.fail(failure)
        return failure.status

    def refusal(
        self, method: str, path: str, headers: Headers, client: Address | None
    ) -> tuple[HTTPException, str] | None:
        """Returns the error and the id of a request that is refused because the queue is full,
        from the request line and headers, before the body is read.

        None if the request takes the normal path: there is room, or another check must answer first.
        """
        if not self.state.is_full or self.state.traces is not None:
            return None
        began = time.perf_counter()
        route = self._exact.get(path, {}).get(method)
        if route is None or not route.uses_queue or not self.state.hosts.allow(headers):
            return None
        try:
            self.state.keys.check(route.access, headers)
        except HTTPException:
            return None
        error = self.state.no_room()
        assert error is not None, "the queue is full"
        if route.convert_error is not None:
            error = route.convert_error(error)
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
            fields = {"request_id": request_id, "client": _shown(client), "method": method, "route": name}
            fields |= {"status": status, "seconds": round(seconds, 6)}  # type: ignore[dict-item]
            log.log(level, "%s %s %s %s %d %.3f s", *fields.values(), extra=fields)

    def find_route(self, method: str, path: str) -> Route:
        return self._match(method, path)[0]

    def decode(self, route: Route, body: bytes) -> Any:
        """Returns the body as the route's type. Raises if it does not match."""
        return _decoded_body(self._decoders[id(route)], body)

    def _match(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        found = self._exact.get(path)
        if found is not None:
            route = found.get("GET" if method == "HEAD" else method)
            if route is None:
                error = HTTPException(405, f"{path} takes {' or '.join(found)}, not {method}")
                convert = next(iter(found.values())).convert_error
                raise error if convert is None else convert(error)
            return route, {}
        for pattern, route in self._patterns:
            if (match := pattern.fullmatch(path)) and route.method == ("GET" if method == "HEAD" else method):
                return route, match.groupdict()
        raise in_format_of(path, HTTPException(404, "there is no such route; see /docs"))

    async def _read(self, route: Route, headers: Headers, receive: Receive, seconds: float | None) -> Any:
        settings = self.state.settings
        size = settings.max_body_bytes if route.form is None else settings.max_file_bytes
        body = await self.state.bodies.read(headers, receive, seconds, size)
        if route.form is not None:
            return read_form(route.form, headers, settings.allowed_origins, body)
        decoder = self._decoders.get(id(route))
        if decoder is None:
            if body.strip() not in (b"", b"{}"):
                raise bad_request(f"{route.path} takes no body; remove it")
            return None
        named = dict(headers)
        if (coding := named.get(b"content-encoding", b"").strip().lower()) not in (b"", b"identity"):
            fact = f"the body has the Content-Encoding {coding.decode('latin-1'):.50}, which is not supported"
            raise HTTPException(415, f"{fact}; send it uncompressed, without this header")
        kind = named.get(b"content-type", b"")
        # browsers send a preflight for this content type, and none for the others
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            if route.any_content_type:
                check_origin(headers, settings.allowed_origins)
                return _decoded_body(decoder, body)
            raise HTTPException(415, "the body must be JSON; send the header Content-Type: application/json")
        return _decoded_body(decoder, body)

    @staticmethod
    def _reads_body(route: Route) -> bool:
        return route.method == "POST" and route.reads_body

    def _seconds(self, request: Request) -> float | None:
        limit = self.state.settings.request_timeout
        given = request.header(b"x-request-timeout")
        if given is None:
            return limit
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < 1e9:
            raise bad_request(f"X-Request-Timeout is {given!r}; give a number of seconds above 0", "X-Request-Timeout")
        return seconds if limit is None else min(seconds, limit)


def _decoded_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    if is_deep_json(body):
        raise bad_request(f"the body is nested too deeply; the limit is {MAX_DEPTH} objects and arrays in one another")
    if is_wide_json(body):
        raise bad_request(f"the body has too many objects and arrays; the limit is {MAX_HOLDERS}, send it in parts")
    body = body.removeprefix(BOM_UTF8)  # .NET's writers put it before a text
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            return as_type(decoder.type, msgspec.json.decode(body))
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not JSON: {error}; send JSON encoded as UTF-8") from None
    except UnicodeDecodeError:  # msgspec checks the encoding of a string only when it makes one
        raise bad_request(f"the body is not UTF-8{_bad_byte(body)}; send JSON encoded as UTF-8") from None


def _bad_byte(body: bytes) -> str:
    """The position of the invalid byte in the body. msgspec's is relative to the string that has it."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f" (byte {error.start})"
    return ""


def _shown(client: Address | None) -> str:
    """The address of the client, or of a proxy."""
    if client is None:
        return "unix"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def _own_id(headers: Headers) -> str | None:
    """The client's X-Request-Id, if it is safe for logs and headers."""
    for name, value in headers:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return None


def _connection(scope: MutableMapping[str, Any]) -> str | None:
    client = scope.get("client")  # None for a unix socket
    return f"{client[0]}:{client[1]}" if client else None


def _pattern(path: str) -> re.Pattern[str]:
    """`{name}` matches one segment of a path, `{name:path}` the rest of it."""
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    text = re.escape(parts[0])
    for name, rest, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if rest else '[^/]+'})" + re.escape(after)
    return re.compile(text)


# Describes a request for its OpenTelemetry span (the conventions for generative AI) and for the debug log.

_WITHOUT_MESSAGES = {"/v1/completions", "/api/generate"}


def record_call(traces: Traces, request: Request, method: str, route: str, status: int, seconds: float) -> None:
    """Records the span of a request that has ended."""
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "gen_ai.request.id": request.id,
    }
    name = f"{method} {route}"
    if request.request_states:
        params = request.request_states[0].message.params
        if isinstance(params, SamplingParams):
            operation = "text_completion" if route in _WITHOUT_MESSAGES else "chat"
        else:
            operation = "embeddings" if params.task == "embed" else "pooling"
        attributes |= _engine_attributes(request)
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.latency.e2e": seconds}
        name = f"{operation} {attributes['gen_ai.response.model']}"
    carrier = {key: value for key in ("traceparent", "tracestate") if (value := request.header(key.encode()))}
    traces.record(name, seconds, attributes, carrier, failed=status >= 500)


def describe_engine_requests(request: Request) -> str:
    """One line for the log: the model, prompts, samples, tokens and times of a request."""
    states = request.request_states
    model = states[0].message.model or next(iter(request.state.engine.models))
    num_prompt = sum(len(one.message.prompt_token_ids) for one in states)
    line = f"{model}, {len(states)} prompts of {num_prompt} tokens"
    samples = [sample for one in states for sample in one.samples]
    if not samples:
        return line  # pooling
    reasons = ", ".join(sorted({str(sample.finish_reason or "abort") for sample in samples}))
    line += f", {sum(one.num_cached for one in states)} of them cached"
    line += f", {len(samples)} samples of {sum(one.num_tokens for one in states)} tokens, ended by {reasons}"
    first = states[0]
    if isinstance(first, GenerationRequestState) and first.metrics.first_token_ts:
        line += f", first token after {first.metrics.first_token_latency:.3f} s"
    return line


def _engine_attributes(request: Request) -> dict[str, Any]:
    states = request.request_states
    first = states[0]
    model = request.state.engine.model(first.message.model).description.name
    num_prompt = sum(len(one.message.prompt_token_ids) for one in states)
    attributes: dict[str, Any] = {
        "gen_ai.system": "slipstream",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.prompt_tokens": num_prompt,
    }
    params = first.message.params
    if not isinstance(params, SamplingParams):
        return attributes
    num_output = sum(one.num_tokens for one in states)
    attributes |= {
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.finish_reasons": [
            str(sample.finish_reason or "abort") for one in states for sample in one.samples
        ],
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if isinstance(first, GenerationRequestState) and first.metrics.first_token_ts:
        attributes["gen_ai.latency.time_to_first_token"] = first.metrics.first_token_latency
    return attributes
