"""Bodies: reads the bodies of requests, bounded in size, in time, and in what all of them hold together."""

from __future__ import annotations

import asyncio

from slipstream.serve.http.auth import Headers
from slipstream.serve.http.counters import Counters
from slipstream.serve.http.errors import HttpError
from slipstream.serve.http.response import Receive
from slipstream.serve.http.settings import ServerSettings
from slipstream.serve.http.watch import ClientGone

_SLOWEST = 2**14  # bytes a second that a body must come at, on average and after the first seconds
_DRAIN_SECONDS = 1.0  # for bodies that are still coming when the server is told to end


class Bodies:
    """Of one front end.

    A body may take `body_timeout` seconds and one more for each 16 KiB that have come: a connection that falls silent,
    or sends a byte now and then, ends; a large body over a slow line arrives.
    """

    def __init__(self, settings: ServerSettings, counters: Counters) -> None:
        self._counters = counters
        self._seconds = settings.body_timeout
        self._max_size = settings.max_body_bytes
        self._max_all = settings.max_bodies_bytes
        self.num_bytes = 0  # of all bodies that are being read
        self._coming: set[asyncio.Timeout] = set()
        self._is_draining = False

    async def read(self, headers: Headers, receive: Receive, seconds: float | None = None) -> bytes:
        """The whole body. `seconds`: what the request may take in all, where that is bounded."""
        self._check_length(headers)
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit = self._seconds if seconds is None else min(self._seconds, seconds)
        parts: list[bytes] = []  # joined once: a large body comes in hundreds of them
        size, more = 0, True
        try:
            async with asyncio.timeout_at(self._deadline(began + limit)) as timeout:
                self._coming.add(timeout)
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message["body"])
                    size, more = size + len(parts[-1]), message["more_body"]
                    self.num_bytes += len(parts[-1])
                    self._check_size(size)
                    if more and not timeout.expired():
                        end = began + self._seconds + size / _SLOWEST
                        timeout.reschedule(self._deadline(end if seconds is None else min(end, began + seconds)))
        except TimeoutError:
            raise self._too_late(size, loop.time() - began, seconds) from None
        finally:
            self._coming.discard(timeout)
            self.num_bytes -= size
        return b"".join(parts)

    def drain(self) -> None:
        """The server ends: bodies that are still coming are not waited for."""
        self._is_draining = True
        soon = asyncio.get_running_loop().time() + _DRAIN_SECONDS
        for timeout in self._coming:
            when = timeout.when()
            if not timeout.expired() and (when is None or when > soon):
                timeout.reschedule(soon)

    def _deadline(self, when: float) -> float:
        return min(when, asyncio.get_running_loop().time() + _DRAIN_SECONDS) if self._is_draining else when

    def _check_length(self, headers: Headers) -> None:
        for name, value in headers:
            # digits are counted first: int() refuses thousands of them
            if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > self._max_size):
                fact = f"the body has {value[:20].decode()} bytes, {self._max_size} are the most"
                raise HttpError(413, f"{fact}; send less at once")

    def _check_size(self, size: int) -> None:
        if size > self._max_size:
            raise HttpError(413, f"the body has more than {self._max_size} bytes; send less at once")
        # a large one is read where no other is
        if self.num_bytes > max(self._max_all, size):
            self._counters.refused["bodies_full"] += 1
            fact = f"bodies of {self.num_bytes} bytes are being read, {self._max_all} may be at once"
            raise HttpError(429, f"{fact}; try again soon", retry_after=1, code="bodies_full")

    def _too_late(self, size: int, passed: float, seconds: float | None) -> HttpError:
        if self._is_draining:
            self._counters.refused["draining"] += 1
            fact = "the server is shutting down, and the body has not come"
            return HttpError(503, f"{fact}; ask another one", retry_after=5, code="draining", closes=True)
        if seconds is not None and passed >= seconds:
            fact = f"the request took longer than its {seconds:g} s, and {size} bytes of its body had come"
            return HttpError(408, f"{fact}; send it faster, or allow more", code="deadline", closes=True)
        self._counters.aborted["body_timeout"] += 1
        fact = f"the body did not come in time: {size} bytes in {passed:.0f} s"
        return HttpError(408, f"{fact}; send it faster, or raise --body-timeout", code="body_timeout", closes=True)
