"""PipeliningProtocol: bounds what a connection holds of requests that come before the answer to the one before them.

A client may send requests without waiting for answers; they are answered one after another. uvicorn parses all that it
reads, also while requests wait, and reads on at each answer: 16 MB of tiny requests took 1 GB. It tells a lost
connection to the request that was parsed last, so that the one that runs was computed to its end.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_SLICE = 2**14  # bytes that are parsed at once: they may hold some hundred requests
_MAX_HELD = 2**16  # unparsed bytes from which on nothing is read; until then a lost connection is noticed


class PipeliningProtocol(HttpToolsProtocol):
    """While a request waits in `pipeline`, the bytes behind it are held, unparsed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._held = bytearray()
        self._running: RequestResponseCycle | None = None  # the last one that was started

    def connection_lost(self, exc: Exception | None) -> None:
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        self._held.clear()
        for cycle in (self._running, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.pipeline or self._held:
            self._hold(data)
        else:
            self._parse(data)

    def parse_slice(self, data: bytes) -> None:
        super().data_received(data)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # paused by uvicorn, which would not notice a lost connection
        else:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._running = following
        if self._held and not self.pipeline:
            self.loop.call_soon(self._parse_held)

    def _parse(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE):
            if self.pipeline:
                self._hold(data[start:])
                return
            if start and self.transport.is_closing():
                return
            self.parse_slice(data[start : start + _SLICE])

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > _MAX_HELD:
            self.flow.block_reading()

    def _parse_held(self) -> None:
        if self.transport.is_closing():
            return
        data = bytes(self._held)
        self._held.clear()
        self.flow.unblock_reading()
        self._parse(data)


class _Flow(FlowControl):
    is_blocked = False

    def block_reading(self) -> None:
        self.is_blocked = True
        self.pause_reading()

    def unblock_reading(self) -> None:
        self.is_blocked = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_blocked:
            super().resume_reading()
