"""Refuses requests of web pages that a browser sends without a preflight request.

A browser asks the server first (CORS) before it sends JSON from another origin, and does not ask for forms and plain
text. Routes that take such bodies check the origin themselves.
"""

from __future__ import annotations

from slipstream.serve.http.auth import Headers
from slipstream.serve.http.errors import HTTPException


def check_origin(headers: Headers, allowed: list[str]) -> None:
    """Raises for a web page whose origin is not allowed. With an API key a browser asks first, so there is no check."""
    found = dict(headers)
    origin = found.get(b"origin", b"").decode("latin-1")
    if origin and not {b"authorization", b"x-api-key"} & found.keys() and not {"*", origin} & set(allowed):
        raise HTTPException(403, f"the origin {origin} is not allowed; add it by --allowed-origins")
