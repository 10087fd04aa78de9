"""Hosts: checks the Host header against the names of this server, as a defence against DNS rebinding.

In such an attack the name of a web page is made to resolve to 127.0.0.1, so that the page's requests to its own name
reach a server on loopback, and the browser lets the page read the responses. These requests have the page's name in the
Host header, which a page cannot change. So a server on loopback accepts loopback names and those of --allowed-hosts.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Literal

from slipstream.base.errors import InvalidOption
from slipstream.serve.http.server.errors import HTTPException
from slipstream.serve.http.server.settings import ServerSettings

_PORT = re.compile(r":\d{0,5}")
_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


class Hosts:
    def __init__(self, settings: ServerSettings) -> None:
        names = [_plain(name) for name in settings.allowed_hosts]
        self._is_loopback = settings.uds is None and is_loopback(settings.host)
        self._checks = "*" not in names and (bool(names) or self._is_loopback)
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        if self._is_loopback:
            self._names |= {"localhost", _plain(settings.host)}

    def allow(self, headers: Headers) -> bool:
        """Whether every Host header names this server. Browsers always send one, so its absence is allowed."""
        if not self._checks:
            return True
        return all(self._is_ours(value.decode("latin-1")) for name, value in headers if name == b"host" and value)

    def check(self, headers: Headers) -> None:
        if not self.allow(headers):
            given = next(value.decode("latin-1") for name, value in headers if name == b"host" and value)
            raise HTTPException(
                403,
                f"the host name {given!r} is not allowed; add it by --allowed-hosts",
                code="host_not_allowed",
            )

    def _is_ours(self, value: str) -> bool:
        bracket = value.rfind("]")
        colon = value.find(":", bracket + 1)
        name, port = (value, "") if colon < 0 else (value[:colon], value[colon:])
        if port and not _PORT.fullmatch(port):
            return False
        name = _plain(name)
        if name in self._names or name.endswith(self._suffixes):
            return True
        return self._is_loopback and _is_loopback_address(name)


def check_hosts(names: list[str]) -> None:
    """Raises for names that cannot be in a Host header."""
    for name in names:
        if not _NAME.fullmatch(name) and not _is_address(_plain(name)):
            raise InvalidOption(
                f"allowed_hosts has {name!r}; give names without scheme and port, like api.example.com, "
                "*.example.com, or * for any"
            )


def is_loopback(host: str) -> bool:
    """Whether this address is reachable from this machine only."""
    if _is_address(host):
        return _is_loopback_address(host)
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except OSError:  # binding to it will raise the error
        return host == "localhost"
    return bool(found) and all(map(_is_loopback_address, found))


def _plain(name: str) -> str:
    """Normalises a name: lower case, without brackets, without the final dot."""
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback_address(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


# Keys: checks API keys. Comparisons take constant time, so that response times reveal nothing about a key.

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
