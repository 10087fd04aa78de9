"""Hosts: checks the Host header against the names of this server, as a defence against DNS rebinding.

In such an attack the name of a web page is made to resolve to 127.0.0.1, so that the page's requests to its own name
reach a server on loopback, and the browser lets the page read the responses. These requests have the page's name in the
Host header, which a page cannot change. So a server on loopback accepts loopback names and those of --allowed-hosts.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from slipstream.base.errors import InvalidOption
from slipstream.serve.http.auth import Headers
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.settings import ServerSettings

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
