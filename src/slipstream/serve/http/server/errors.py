"""HTTPException: an error response, with OpenAI's error object as its body.

400 invalid request    401, 403 API key        404 unknown route or model      405 wrong method
408 deadline           413 body too large      415 not JSON                    429 queue full
500 internal error     503 not ready, draining, asleep, or the engine is lost
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from slipstream.base.errors import (
    EngineAsleep,
    EngineClosed,
    EngineDead,
    ModelNotFound,
    QueueFull,
    ReplicaLost,
    SlipstreamError,
    UserError,
)
from slipstream.base.typed import Mismatch, convert
from slipstream.config.options import Options


class HTTPException(Exception):
    """Ends a request with a status and a message. Named like Starlette's, with the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        closes: bool = False,
    ) -> None:
        """`closes`: the connection is closed after the response, because the request's body was not read."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.closes = closes

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorObject(self.message, self.kind, self.param, self.code)))

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [(b"connection", b"close")] if self.closes else []
        if self.retry_after is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        return found


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorObject


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HTTPException:
    return HTTPException(400, message, param=param, code=code)


def check_needed(body: Any, names: Iterable[str], needed: str) -> None:
    """Raises for a field that is given and has no effect without the field `needed`, which is not."""
    for name in names:
        if getattr(body, name) is not None:
            raise bad_request(f"{name} needs {needed}; give {needed}, or remove it", name)


def aborted() -> HTTPException:
    """The error for a request that was ended, by an admin or the end of the server, before it had a result."""
    return HTTPException(503, "the request was aborted; send it again", code="aborted", retry_after=1)


def as_type(kind: Any, value: Any, path: str = "") -> Any:
    """JSON that was decoded without a type, as this type. `path`: its place in the body."""
    try:
        return convert(kind, value, path)
    except Mismatch as error:
        raise bad_request(str(error), error.path or None, error.code) from None


def as_http_error(
    error: BaseException, request_id: str, names: Mapping[str, str] = MappingProxyType({})
) -> HTTPException:
    """Converts an exception. Texts of our own exceptions are public; any other gets a reference to the log.

    `names`: engine parameters that have another name in the request.
    """
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, UserError):
        param = None if error.param is None else names.get(error.param, error.param)
        return bad_request(in_http(str(error), names), param, error.code)
    if isinstance(error, ModelNotFound):
        return HTTPException(404, str(error), param="model", code="model_not_found")
    if isinstance(error, QueueFull):
        return HTTPException(429, str(error), retry_after=1, code="queue_full")
    if isinstance(error, ReplicaLost):
        return HTTPException(503, str(error), retry_after=1, code="replica_lost")
    if isinstance(error, EngineAsleep):
        return HTTPException(503, str(error), code="engine_asleep")
    if isinstance(error, EngineDead | EngineClosed):
        return HTTPException(
            503, "the engine has ended and takes no more requests; restart the server", code="engine_dead"
        )
    if isinstance(error, SlipstreamError):
        return bad_request(in_http(str(error), names))
    return HTTPException(500, f"internal error; see the server's log for {request_id}")


# Rewrites errors of the engine for the command line: options are named as flags.


class Flags:
    """Rewrites names of options in a text: max_model_len is --max-model-len, dtype="x" is --dtype x."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    # compiled for the first error: together they take 8 ms

    @functools.cached_property
    def _assigned(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w./-])({'|'.join(self._names)})=([\"']?)([\w.]+)\2")

    @functools.cached_property
    def _alone(self) -> re.Pattern[str]:
        # a name of one word may be just that word
        several = "|".join(name for name in self._names if "_" in name)
        return re.compile(rf"(?<![\w./-])({several})(?![\w./])(?!-)")

    def __call__(self, text: str) -> str:
        text = self._assigned.sub(lambda match: _flag(match[1], match[3]), text)
        return self._alone.sub(lambda match: _flag(match[1]), text)


def _flag(name: str, value: str | None = None) -> str:
    flag = name.replace("_", "-")
    if value == "False":
        return f"--no-{flag}"
    return f"--{flag}" if value in (None, "True") else f"--{flag} {value}"


# Rewrites error texts of the engine for HTTP clients: field names of the request, flags of the server, JSON values.

_in_flags = Flags(name for name in Options.__struct_fields__ if "_" in name)
_VALUES = {"True": "true", "False": "false", "None": "null"}
_ASSIGNED = re.compile(r"\b(\w+)=(True|False|None)\b")
_ALONE = re.compile(r"(?<!['\"\w])(True|False|None)(?!['\"\w])")


def in_http(text: str, names: Mapping[str, str]) -> str:
    """`names`: engine parameters that have another name in the request."""
    if names:
        pattern = re.compile(rf"(?<![\w'\"])({'|'.join(map(re.escape, names))})(?![\w'\"])")
        text = pattern.sub(lambda match: names[match[1]], text)
    text = _in_flags(text)
    text = _ASSIGNED.sub(lambda match: f'"{match[1]}": {_VALUES[match[2]]}', text)
    return _ALONE.sub(lambda match: _VALUES[match[1]], text)
