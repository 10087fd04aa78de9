"""Keys: checks API keys. Comparisons take constant time, so that response times reveal nothing about a key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from slipstream.serve.http.errors import HTTPException

Access = Literal["open", "user", "admin"]
Headers = Sequence[tuple[bytes, bytes]]


class Keys:
    def __init__(self, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._user = [_digest(key.encode()) for key in api_keys]
        self._admin = None if admin_key is None else _digest(admin_key.encode())

    @property
    def are_used(self) -> bool:
        """Whether requests need a key."""
        return bool(self._user)

    @property
    def are_several(self) -> bool:
        """Whether each key is one caller."""
        return len(self._user) > 1

    def caller(self, headers: Headers) -> str | None:
        """A name of the request's key, where the server has several keys: each is one caller. None with one key."""
        return f"key {_digest(given_key(headers)).hex()[:16]}" if self.are_several else None

    def owner(self, headers: Headers) -> str:
        """A name of the request's key, under which its data is kept in memory; the same for all without keys."""
        return _digest(given_key(headers)).hex() if self._user else ""

    def check(self, access: Access, headers: Headers) -> None:
        """Raises if the request has no key for this access."""
        if access == "open" or (access == "user" and not self._user):
            return
        if access == "admin" and self._admin is None:
            raise HTTPException(403, "admin routes are disabled; start the server with --admin-key to enable them")
        given = _digest(given_key(headers))
        is_admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        is_user = False
        for key in self._user:  # no early exit: constant time
            is_user |= hmac.compare_digest(given, key)
        if is_admin or (access == "user" and is_user):
            return
        if access == "admin" and is_user:
            raise HTTPException(403, "this key has no access to admin routes; send the admin key")
        raise HTTPException(
            401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key"
        )


def given_key(headers: Headers) -> bytes:
    """The API key of a request; empty if it has none."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            return value.strip()
    return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # equal lengths, so that comparing reveals none
