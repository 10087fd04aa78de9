"""Bodies: reads request bodies, with limits on size, time, and the memory of all bodies together."""

from __future__ import annotations

import asyncio

from slipstream.serve.http.auth import Headers
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.response_writer import Receive
from slipstream.serve.http.server_stats import Counters
from slipstream.serve.http.settings import ServerSettings
from slipstream.serve.http.watch import ClientDisconnect

MIN_RATE = 2**14  # bytes per second of a body, on average after the first seconds
_DRAIN_SECONDS = 1.0  # for bodies that are incomplete when the server begins to drain


class Bodies:
    """The bodies of one front end.

    A body may take `body_timeout` seconds, and one more for each 16 KiB received: so a stalled connection, or one with
    a byte now and then, is closed, and a large body over a slow line is accepted.
    """

    def __init__(self, settings: ServerSettings, counters: Counters) -> None:
        self._counters = counters
        self._seconds = settings.body_timeout
        self._max_all = settings.max_bodies_bytes
        self.num_bytes = 0  # of all bodies that are being read
        self._timeouts: set[asyncio.Timeout] = set()  # of bodies that are being read
        self._is_draining = False

    async def read(self, headers: Headers, receive: Receive, seconds: float | None, max_size: int) -> bytes:
        """Returns the whole body of at most `max_size` bytes. `seconds`: the time limit of the whole request, if it has
        one."""
        _check_length(headers, max_size)
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit = self._seconds if seconds is None else min(self._seconds, seconds)
        parts: list[bytes] = []  # joined once: a large body has hundreds
        size, more = 0, True
        try:
            async with asyncio.timeout_at(self._deadline(began + limit)) as timeout:
                self._timeouts.add(timeout)
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message["body"])
                    size, more = size + len(parts[-1]), message["more_body"]
                    self.num_bytes += len(parts[-1])
                    self._check_size(size, max_size)
                    if more and not timeout.expired():
                        end = began + self._seconds + size / MIN_RATE
                        timeout.reschedule(self._deadline(end if seconds is None else min(end, began + seconds)))
        except TimeoutError:
            raise self._too_late(size, loop.time() - began, seconds) from None
        finally:
            self._timeouts.discard(timeout)
            self.num_bytes -= size
        return b"".join(parts)

    def drain(self) -> None:
        """The server is draining: limits the time of incomplete bodies."""
        self._is_draining = True
        soon = asyncio.get_running_loop().time() + _DRAIN_SECONDS
        for timeout in self._timeouts:
            when = timeout.when()
            if not timeout.expired() and (when is None or when > soon):
                timeout.reschedule(soon)

    def _deadline(self, when: float) -> float:
        return min(when, asyncio.get_running_loop().time() + _DRAIN_SECONDS) if self._is_draining else when

    def _check_size(self, size: int, max_size: int) -> None:
        if size > max_size:
            raise HTTPException(413, f"the body has more than {max_size} bytes; send less at once")
        # a body above the limit for all is accepted while no other is being read
        if self.num_bytes > max(self._max_all, size):
            self._counters.refused["bodies_full"] += 1
            fact = f"bodies with {self.num_bytes} bytes are being read, the limit is {self._max_all}"
            raise HTTPException(429, f"{fact}; try again soon", retry_after=1, code="bodies_full")

    def _too_late(self, size: int, passed: float, seconds: float | None) -> HTTPException:
        if self._is_draining:
            self._counters.refused["draining"] += 1
            fact = "the server is shutting down, and the body is incomplete"
            return HTTPException(503, f"{fact}; use another server", retry_after=5, code="draining", closes=True)
        if seconds is not None and passed >= seconds:
            fact = f"the request took longer than its {seconds:g} s, with {size} bytes of its body received"
            return HTTPException(
                408, f"{fact}; send it faster, or raise X-Request-Timeout", code="deadline", closes=True
            )
        self._counters.aborted["body_timeout"] += 1
        fact = f"the body is incomplete after {passed:.0f} s, with {size} bytes received"
        return HTTPException(408, f"{fact}; send it faster, or raise --body-timeout", code="body_timeout", closes=True)


def _check_length(headers: Headers, max_size: int) -> None:
    for name, value in headers:
        # the length is checked first: int() raises for thousands of digits
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > max_size):
            fact = f"the body has {value[:20].decode()} bytes, the limit is {max_size}"
            raise HTTPException(413, f"{fact}; send less at once")
