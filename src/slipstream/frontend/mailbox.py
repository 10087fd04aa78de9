"""Mailbox: how one reader hears of the requests it waits for. A slow reader finds what has come since, not a queue."""

from __future__ import annotations

import asyncio

from slipstream.frontend.request_state import RequestState


class Mailbox:
    """Holds no results: it only names the requests that moved. What is new in them is asked of them when the reader
    has time, so many steps may melt into one increment and nobody waits for a slow reader."""

    __slots__ = ("_moved", "_error", "_waiter")

    def __init__(self) -> None:
        self._moved: dict[str, RequestState] = {}
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, track: RequestState) -> None:
        self._moved[track.id] = track
        self._wake()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error  # the first is the cause
        self._wake()

    async def get(self) -> list[RequestState]:
        """Those that moved since the last call; at least one."""
        while not self._moved and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._moved:
            moved, self._moved = list(self._moved.values()), {}
            return moved
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
