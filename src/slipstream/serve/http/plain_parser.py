"""PlainParser: httptools' parser of requests, for which `Upgrade` has no effect.

A server may ignore an offer to change the protocol (RFC 9110, 7.8), and the request is then answered as any other. Some
clients offer HTTP/2 in every request: Java's. httptools stops at the headers of such a request, without its body, and
takes the bytes of the body for the next request. Here the request is parsed again, without the offer.
"""

from __future__ import annotations

from typing import Protocol

import httptools

_OFFER = (b"upgrade", b"http2-settings")


class Receiver(Protocol):
    """The callbacks of the parser. At the end of headers it sets `plain_headers` to what `without_offer` returns; while
    they are not empty, headers and message have not ended."""

    plain_headers: bytes


class PlainParser:
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._renew()

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                return self._feed(data)
            except httptools.HttpParserUpgrade as pause:
                headers, self._receiver.plain_headers = self._receiver.plain_headers, b""
                if not headers:
                    raise
                self._renew()
                data = headers + data[pause.args[0] :]

    def without_offer(self, target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Returns request line and headers of a request with an offer, without the offer; empty for other requests."""
        method = self.get_method() if self.should_upgrade() else b"CONNECT"
        if method == b"CONNECT":  # nothing is left of it without the other protocol
            return b""
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, self.get_http_version().encode(), _lines(headers))

    def _renew(self) -> None:
        parser = httptools.HttpRequestParser(self._receiver)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self._feed = parser.feed_data
        self.get_method, self.get_http_version = parser.get_method, parser.get_http_version
        self.should_keep_alive, self.should_upgrade = parser.should_keep_alive, parser.should_upgrade


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    lower = [(name.lower(), value) for name, value in headers]
    kept = [(name, value) for name, value in lower if name not in _OFFER and name != b"connection"]
    wishes = [wish.strip().lower() for name, value in lower if name == b"connection" for wish in value.split(b",")]
    kept += [(b"connection", wish) for wish in wishes if wish in (b"close", b"keep-alive")]
    return b"".join(b"%b: %b\r\n" % header for header in kept)
