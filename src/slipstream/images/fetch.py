"""Fetches the images of http and https URLs for requests of strangers.

A URL is fetched only if its domain is allowed. The domain is resolved once, the connection goes to an address that was
checked, and the domain is used for the certificate and the Host header only: a name that resolves differently the next
time changes nothing. Addresses of this machine, its networks and its cloud are refused, also inside of IPv6 addresses.
Each redirect is a URL like the first. Size and times are limited while data arrive, and a type that the server names is
not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import httptools
import msgspec

from slipstream.base.errors import InvalidImage
from slipstream.base.turns import CallerTurns, FairThreads

_MAX_REDIRECTS = 5
_MAX_HEADER = 2**16  # bytes of an answer's header
_MAX_URL = 2**13  # characters
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_ADDRESSES = 3  # that are tried
_MAX_OPEN = 64  # connections, half of them for one caller
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")
_PRINTED = "".join(map(chr, range(0x21, 0x7F)))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# besides what `ipaddress` knows: protocol assignments, local NAT64, and a public address that serves Azure's metadata
_REFUSED = [
    ipaddress.ip_network(each)
    for each in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "64:ff9b:1::/48", "3fff::/20", "5f00::/16")
]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchRules(msgspec.Struct, frozen=True, kw_only=True):
    domains: tuple[str, ...] = ()  # that are allowed; "*": all
    connect_seconds: float = 5.0
    read_seconds: float = 5.0  # between two parts
    total_seconds: float = 30.0  # of one URL, with its redirects


class Fetcher:
    """For one event loop."""

    def __init__(self, rules: FetchRules) -> None:
        self.rules = rules
        self._domains = frozenset(domain.lower() for domain in rules.domains)
        self._context: ssl.SSLContext | None = None  # read from files at the first https URL
        # a resolver that does not answer holds up threads that nothing else uses
        self._resolvers = FairThreads(8, "slipstream-names", 256, "URLs")
        self._turns: CallerTurns[asyncio.Future[None]] = CallerTurns(_MAX_OPEN // 2)
        self._num_open = 0

    async def fetch(self, url: str, caller: str, max_bytes: int) -> bytes:
        """The content of a URL. Raises InvalidImage."""
        parts = self._check(url)  # what is not allowed is an error at once
        try:
            async with asyncio.timeout(self.rules.total_seconds), self._turn(caller):
                for _ in range(_MAX_REDIRECTS + 1):
                    answer = await self._get(parts, caller, max_bytes)
                    if answer.location is None:
                        return bytes(answer.body)
                    parts = self._check(urljoin(parts.geturl(), answer.location))
        except TimeoutError:
            raise InvalidImage(
                f"{_short(url)} was not fetched within {self.rules.total_seconds:g} s; send the image in the request"
            ) from None
        raise InvalidImage(f"{_short(url)} is redirected more than {_MAX_REDIRECTS} times; give the last URL")

    def close(self) -> None:
        self._resolvers.close(wait=False)

    @asynccontextmanager
    async def _turn(self, caller: str) -> AsyncIterator[None]:
        """One of the connections that may be open, when it is this caller's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.add(caller, turn, turn)
        self._open_next()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._num_open -= 1
                self._turns.end(caller)
                self._open_next()
            else:
                self._turns.discard(caller, turn)

    def _open_next(self) -> None:
        while self._num_open < _MAX_OPEN and (taken := self._turns.take()) is not None:
            caller, turn = taken
            if turn.cancelled():
                self._turns.end(caller)
            else:
                self._num_open += 1
                turn.set_result(None)

    def _check(self, url: str) -> SplitResult:
        """Raises InvalidImage unless the URL may be fetched."""
        if len(url) > _MAX_URL or re.search(r"[\x00-\x1f\x7f\\]", url):
            raise InvalidImage(f"an image's URL has over {_MAX_URL} characters, or control characters; correct it")
        try:
            parts = urlsplit(quote(url, safe=_PRINTED))
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if not host or parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or port == 0:
            raise InvalidImage(f"{_short(url)} is no http or https URL of an image; give one, or a data URL")
        if "@" in parts.netloc:
            raise InvalidImage("an image's URL has a user name; images are fetched without keys: leave it out")
        if not self._domains & {"*", host.rstrip(".")}:
            raise InvalidImage(
                f"images of {host} are not fetched: the server allows {', '.join(sorted(self._domains)) or 'no domain'}"
                " (--allowed-media-domains); send the image in the request"
            )
        return parts

    async def _get(self, parts: SplitResult, caller: str, max_bytes: int) -> _Answer:
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            addresses = await self._resolve(host, port, caller)
            reader, writer = await self._connect(addresses, port, host if parts.scheme == "https" else None)
        except (OSError, TimeoutError) as error:
            raise InvalidImage(f"{host} cannot be reached: {_reason(error)}; send the image in the request") from None
        try:
            return await self._read(parts, reader, writer, _Answer(max_bytes))
        except (OSError, TimeoutError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise InvalidImage(f"{host} sent no complete answer: {_reason(error)}; send the image itself") from None
        finally:
            writer.transport.abort()  # an orderly end of TLS would wait for the server

    async def _resolve(self, host: str, port: int, caller: str) -> list[str]:
        """Addresses of the host to which a connection is allowed."""
        future = self._resolvers.submit(caller, partial(self._look_up, host, port))
        async with asyncio.timeout(self.rules.connect_seconds):
            found = await asyncio.wrap_future(future)
        addresses = [str(address).partition("%")[0] for *_, (address, *_) in found]
        public = [address for address in addresses if is_public(ipaddress.ip_address(address))]
        if not public:
            raise InvalidImage(
                f"images of {host} are not fetched: its address is of this machine or a private network; "
                "send the image in the request"
            )
        return public[:_MAX_ADDRESSES]

    def _look_up(self, host: str, port: int) -> list[Any]:
        """In a thread."""
        self._context = self._context or ssl.create_default_context()
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)

    async def _connect(
        self, addresses: list[str], port: int, encrypted_host: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        last: OSError | TimeoutError = OSError("it has no address")
        context = None if encrypted_host is None else self._context
        for address in addresses:
            try:
                async with asyncio.timeout(self.rules.connect_seconds):
                    return await asyncio.open_connection(address, port, ssl=context, server_hostname=encrypted_host)
            except (OSError, TimeoutError) as error:
                last = error
        raise last

    async def _read(
        self, parts: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _Answer
    ) -> _Answer:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = (
            f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", "User-Agent: slipstream",
            "Accept: image/*, video/*, */*", "Accept-Encoding: identity", "Connection: close",
        )  # fmt: skip
        writer.write("\r\n".join((*fields, "", "")).encode("ascii"))
        while not answer.is_complete:
            async with asyncio.timeout(self.rules.read_seconds):
                data = await reader.read(2**16)
            if not data:
                answer.end()
                break
            answer.feed(data)
        return answer


class _Answer:
    """Callbacks of the parser of an answer, and what they have found."""

    def __init__(self, max_bytes: int) -> None:
        self.location: str | None = None
        self.body = bytearray()
        self.is_complete = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._max_bytes = max_bytes
        self._header_bytes = 0
        self._has_header = False
        self._is_open_ended = True
        self._error: InvalidImage | None = None

    def feed(self, data: bytes) -> None:
        if not self._has_header:
            self._header_bytes += len(data)
            if self._header_bytes > 2 * _MAX_HEADER:
                raise InvalidImage("the server of an image sent a header without end; send the image in the request")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._error is not None:  # raised by a callback
                raise self._error from None
            raise

    def end(self) -> None:
        """The server has closed the connection."""
        if not (self._has_header and self._is_open_ended):
            raise OSError("it closed the connection")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"location":
            self.location = quote(value, safe=_PRINTED)
        elif name == b"content-length":
            self._is_open_ended = False
            if value.isdigit() and int(value[:20]) > self._max_bytes:
                self._fail(f"an image has {value.decode()[:20]} bytes")
        elif name == b"transfer-encoding":
            self._is_open_ended = False

    def on_headers_complete(self) -> None:
        code = self._parser.get_status_code()
        if code < 200:  # another answer follows
            return
        self._has_header = True
        if code in _REDIRECTS and self.location is not None:
            self.is_complete = True
        elif code != 200:
            self._error = InvalidImage(f"the server of an image answered {code} instead of 200; correct its URL")
            raise self._error
        else:
            self.location = None

    def on_body(self, data: bytes) -> None:
        if not self.is_complete:
            self.body += data
        if len(self.body) > self._max_bytes:
            self._fail("an image has more bytes")

    def on_message_complete(self) -> None:
        self.is_complete = self.is_complete or self._has_header

    def _fail(self, fact: str) -> None:
        self._error = InvalidImage(f"{fact}, and at most {self._max_bytes} are accepted; make it smaller")
        raise self._error


def is_public(address: Address) -> bool:
    """Whether an address is of the internet, and none in it of this machine or its networks."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_site_local:
            return False
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64 or int(address) >> 32 == 0:  # the second: an obsolete form of an IPv4 address
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if not all(is_public(each) for each in inner if each is not None):
            return False
        if address.ipv4_mapped is not None:
            return True
    is_refused = any(address in network for network in _REFUSED)
    return address.is_global and not address.is_multicast and not is_refused


def _short(url: str) -> str:
    return url if len(url) <= 100 else url[:97] + "..."


def _reason(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)[:200] or type(error).__name__
