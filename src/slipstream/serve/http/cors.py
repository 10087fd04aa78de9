"""Cors: adds CORS headers for the origins of --allowed-origins. It is not used without any, and browsers allow none."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from slipstream.serve.http.app import App
from slipstream.serve.http.auth import Headers
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.request import Address
from slipstream.serve.http.response_writer import Receive, Send
from slipstream.serve.http.settings import ServerSettings

_MAX_AGE = b"600"  # seconds for which a browser caches a preflight
_METHODS = b"GET, POST, DELETE"  # of all routes
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after")


class Cors:
    """ASGI middleware: answers preflight requests, and adds headers to the other responses."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self.app = app
        self._origins = frozenset(settings.allowed_origins)
        self._methods = _joined(settings.allowed_methods) or _METHODS
        self._headers = _joined(settings.allowed_headers)  # None: any
        self._credentials = settings.allow_credentials

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        origin = _find(headers, b"origin")
        if scope["type"] != "http" or origin is None:
            await self.app(scope, receive, send)
            return
        own = self._own(origin) if self.app.state.hosts.allow(headers) else []
        if scope["method"] == "OPTIONS" and _find(headers, b"access-control-request-method") is not None:
            await self._answer_preflight(headers, origin, own, send)
            return

        async def send_with(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *own, *([_EXPOSED] if own else [])]
            await send(message)

        await self.app(scope, receive, send_with)

    def refusal(
        self, method: str, path: str, headers: Headers, client: Address | None
    ) -> tuple[HTTPException, str] | None:
        """Like `App.refusal`, but a browser's request takes the normal path, which adds the CORS headers."""
        return self.app.refusal(method, path, headers, client) if _find(headers, b"origin") is None else None

    def _own(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """The headers for an origin; empty if it is not allowed."""
        any_origin = "*" in self._origins
        if not any_origin and origin.decode("latin-1") not in self._origins:
            return []
        if any_origin:
            return [(b"access-control-allow-origin", b"*")]  # without credentials: browsers forbid both together
        own = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        return [*own, (b"access-control-allow-credentials", b"true")] if self._credentials else own

    async def _answer_preflight(
        self, headers: Headers, origin: bytes, own: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        body, status = b"", 204
        if own:
            wanted = _find(headers, b"access-control-request-headers") or b""
            own = [
                *own,
                (b"access-control-allow-methods", self._methods),
                (b"access-control-allow-headers", wanted if self._headers is None else self._headers),
                (b"access-control-max-age", _MAX_AGE),
            ]
        else:
            error = self._refused(headers, origin)
            body, status, own = error.body(), error.status, [(b"content-type", b"application/json")]
        if body:
            own.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": own})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _refused(self, headers: Headers, origin: bytes) -> HTTPException:
        try:
            self.app.state.hosts.check(headers)
        except HTTPException as error:
            return error
        shown = origin.decode("latin-1")
        return HTTPException(403, f"the origin {shown} is not allowed; add it by --allowed-origins")


def _joined(given: list[str]) -> bytes | None:
    return None if not given or "*" in given else ", ".join(given).encode()


def _find(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
