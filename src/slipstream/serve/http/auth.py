"""Keys: who may call which route. Every comparison takes the same time, whatever was sent."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from slipstream.serve.http.errors import HttpError

Access = Literal["open", "user", "admin"]
Headers = Sequence[tuple[bytes, bytes]]


class Keys:
    def __init__(self, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._user = [_digest(key.encode()) for key in api_keys]
        self._admin = None if admin_key is None else _digest(admin_key.encode())

    def caller(self, headers: Headers) -> str | None:
        """A name for the key of a request, where there are several: each key is one caller's."""
        return f"key {_digest(_given(headers)).hex()[:16]}" if len(self._user) > 1 else None

    def check(self, access: Access, headers: Headers) -> None:
        """Raises unless this request may go on."""
        if access == "open" or (access == "user" and not self._user):
            return
        if access == "admin" and self._admin is None:
            raise HttpError(403, "admin routes are closed; start the server with --admin-key to open them")
        given = _digest(_given(headers))
        is_admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        is_user = False
        for key in self._user:  # all of them, so that the time does not tell which it was
            is_user |= hmac.compare_digest(given, key)
        if is_admin or (access == "user" and is_user):
            return
        if access == "admin" and is_user:
            raise HttpError(403, "this key may not call admin routes; send the admin key")
        raise HttpError(
            401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key"
        )


def _given(headers: Headers) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            return value.strip()
    return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of one length, so that comparing tells no lengths
