"""Bodies: reads request bodies, with limits on size, time, and the memory of all bodies together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from slipstream.serve.http.server.access import Headers
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.response import Receive
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.stats import Counters

MIN_RATE = 2**14  # bytes per second of a body, on average after the first seconds
_DRAIN_SECONDS = 1.0  # for bodies that are incomplete when the server begins to drain


class Bodies:
    """The bodies of one front end.

    A body may take `body_timeout` seconds, and one more for each 16 KiB received: so a stalled connection, or one with
    a byte now and then, is closed, and a large body over a slow line is accepted.
    """

    def __init__(self, settings: ServerSettings, counters: Counters) -> None:
        self._counters = counters
        self._seconds = settings.body_timeout
        self._max_all = settings.max_bodies_bytes
        self.num_bytes = 0  # of all bodies that are being read
        self._timeouts: set[asyncio.Timeout] = set()  # of bodies that are being read
        self._is_draining = False

    async def read(self, headers: Headers, receive: Receive, seconds: float | None, max_size: int) -> bytes:
        """Returns the whole body of at most `max_size` bytes. `seconds`: the time limit of the whole request, if it has
        one."""
        _check_length(headers, max_size)
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit = self._seconds if seconds is None else min(self._seconds, seconds)
        parts: list[bytes] = []  # joined once: a large body has hundreds
        size, more = 0, True
        try:
            async with asyncio.timeout_at(self._deadline(began + limit)) as timeout:
                self._timeouts.add(timeout)
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message["body"])
                    size, more = size + len(parts[-1]), message["more_body"]
                    self.num_bytes += len(parts[-1])
                    self._check_size(size, max_size)
                    if more and not timeout.expired():
                        end = began + self._seconds + size / MIN_RATE
                        timeout.reschedule(self._deadline(end if seconds is None else min(end, began + seconds)))
        except TimeoutError:
            raise self._timed_out(size, loop.time() - began, seconds) from None
        finally:
            self._timeouts.discard(timeout)
            self.num_bytes -= size
        return b"".join(parts)

    def drain(self) -> None:
        """The server is draining: limits the time of incomplete bodies."""
        self._is_draining = True
        soon = asyncio.get_running_loop().time() + _DRAIN_SECONDS
        for timeout in self._timeouts:
            when = timeout.when()
            if not timeout.expired() and (when is None or when > soon):
                timeout.reschedule(soon)

    def _deadline(self, when: float) -> float:
        return min(when, asyncio.get_running_loop().time() + _DRAIN_SECONDS) if self._is_draining else when

    def _check_size(self, size: int, max_size: int) -> None:
        if size > max_size:
            raise HTTPException(413, f"the body has more than {max_size} bytes; send less at once")
        # a body above the limit for all is accepted while no other is being read
        if self.num_bytes > max(self._max_all, size):
            self._counters.refused["bodies_full"] += 1
            fact = f"bodies with {self.num_bytes} bytes are being read, the limit is {self._max_all}"
            raise HTTPException(429, f"{fact}; try again soon", retry_after=1, code="bodies_full")

    def _timed_out(self, size: int, passed: float, seconds: float | None) -> HTTPException:
        if self._is_draining:
            self._counters.refused["draining"] += 1
            fact = "the server is shutting down, and the body is incomplete"
            return HTTPException(503, f"{fact}; use another server", retry_after=5, code="draining", closes=True)
        if seconds is not None and passed >= seconds:
            fact = f"the request took longer than its {seconds:g} s, with {size} bytes of its body received"
            return HTTPException(
                408, f"{fact}; send it faster, or raise X-Request-Timeout", code="deadline", closes=True
            )
        self._counters.aborted["body_timeout"] += 1
        fact = f"the body is incomplete after {passed:.0f} s, with {size} bytes received"
        return HTTPException(408, f"{fact}; send it faster, or raise --body-timeout", code="body_timeout", closes=True)


def _check_length(headers: Headers, max_size: int) -> None:
    for name, value in headers:
        # the length is checked first: int() raises for thousands of digits
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > max_size):
            fact = f"the body has {value[:20].decode()} bytes, the limit is {max_size}"
            raise HTTPException(413, f"{fact}; send less at once")


# Watch: cancels a handler when its client disconnects or its deadline passes.


class ClientDisconnect(Exception):
    """The client has closed the connection."""

    cause = "disconnect"


class Watch:
    """A context manager around the handler of one request.

    When the client disconnects or the deadline passes, the task is cancelled, and the `with` block raises
    `ClientDisconnect`, or an error with status 408.
    """

    def __init__(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        seconds: float | None,
        left: float | None = None,
    ) -> None:
        """`seconds`: the request's whole time limit; `left`: the part that remains, all of it by default."""
        self._receive = receive
        self._seconds = seconds
        self._left = seconds if left is None else left
        self._reason: Exception | None = None
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Watch:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        loop = asyncio.get_running_loop()
        self._listener = loop.create_task(self._listen())
        if self._seconds is not None and self._left is not None:
            fact = f"the request took longer than its {self._seconds:g} s"
            timed_out = HTTPException(408, f"{fact}; send less, or raise X-Request-Timeout", code="deadline")
            self._timer = loop.call_later(max(0.0, self._left), self._cancel, timed_out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._listener.cancel()
        if self._timer is not None:
            self._timer.cancel()
        task, reason = self._task, self._reason
        # breaks reference cycles through the task and the traceback, which would keep the request's body in memory
        del self._listener, self._task, self._reason
        if reason is not None:
            task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                try:
                    raise reason from None
                finally:
                    del reason

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel(ClientDisconnect())

    def _cancel(self, reason: Exception) -> None:
        if not self._over and self._reason is None:
            self._reason = reason
            self._task.cancel()


# Reads bodies of type multipart/form-data, with which clients upload files.

_MAX_PARTS = 16
_MAX_HEADER_BYTES = 4096
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.I)
_DISPOSITION = re.compile(rb"^content-disposition:([^\r\n]*)", re.I | re.M)
_PARAM = re.compile(rb';\s*([\w*]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')  # .NET's client quotes no names


class FormPart(NamedTuple):
    data: bytes
    filename: str | None = None

    def text(self, name: str) -> str:
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise bad_request(f"{name} is not UTF-8; send text", name) from None


def read_form(kind: type[msgspec.Struct], headers: Headers, origins: list[str], body: bytes) -> dict[str, FormPart]:
    """Returns the parts by name. Raises for names that are not fields of `kind`, and where a required one is missing.

    `origins`: those of web pages that may send forms.
    """
    kind_given = dict(headers).get(b"content-type", b"")
    boundary = _BOUNDARY.search(kind_given)
    if kind_given.partition(b";")[0].strip().lower() != b"multipart/form-data" or boundary is None:
        raise HTTPException(415, "the body must be a form; send the header Content-Type: multipart/form-data")
    check_origin(headers, origins)
    parts = _split(body, boundary[1] or boundary[2])
    fields = msgspec.structs.fields(kind)
    known = {field.encode_name: field for field in fields}
    for name in parts:
        if name not in known:
            raise bad_request(f"there is no field {name[:100]}; remove it", name[:100])
    for name, field in known.items():
        if field.required and name not in parts:
            raise bad_request(f"{name} is missing; give it", name)
    return parts


def _split(body: bytes, boundary: bytes) -> dict[str, FormPart]:
    mark = b"--" + boundary
    start = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2  # a form may begin with other lines
    if not body.startswith(mark, start):
        raise bad_request("the form has no line with its boundary; send multipart/form-data")
    parts: dict[str, FormPart] = {}
    start += len(mark)
    while not body.startswith(b"--", start):
        header_end = body.find(b"\r\n\r\n", start, start + _MAX_HEADER_BYTES)
        end = -1 if header_end < 0 else body.find(b"\r\n" + mark, header_end + 2)
        if end < 0:
            raise bad_request("the form is cut off, or a part has no header; send multipart/form-data")
        params = _params(body[start:header_end])
        name = params.get(b"name", b"").decode(errors="replace")
        if not name or name in parts or len(parts) == _MAX_PARTS:
            fact = "a part has no name" if not name else f"{name[:100]} is given twice, or there are too many parts"
            raise bad_request(f"the form is invalid: {fact}; send each field once", name[:100] or None)
        filename = params[b"filename"].decode(errors="replace") if b"filename" in params else None
        parts[name] = FormPart(body[header_end + 4 : end], filename)
        start = end + 2 + len(mark)
    return parts


def _params(headers: bytes) -> dict[bytes, bytes]:
    """The parameters of the header Content-Disposition, by name in lower case."""
    found = _DISPOSITION.search(headers)
    values = () if found is None else _PARAM.findall(found[1])
    return {name.lower(): quoted or plain for name, quoted, plain in values}


# Refuses requests of web pages that a browser sends without a preflight request.
#
# A browser asks the server first (CORS) before it sends JSON from another origin, and does not ask for forms and plain
# text. Routes that take such bodies check the origin themselves.


def check_origin(headers: Headers, allowed: list[str]) -> None:
    """Raises for a web page whose origin is not allowed. With an API key a browser asks first, so there is no check."""
    found = dict(headers)
    origin = found.get(b"origin", b"").decode("latin-1")
    if origin and not {b"authorization", b"x-api-key"} & found.keys() and not {"*", origin} & set(allowed):
        raise HTTPException(403, f"the origin {origin} is not allowed; add it by --allowed-origins")
