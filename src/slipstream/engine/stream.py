"""Mailbox: one request's results on their way to one reader. A slow reader finds the newest, not a queue."""

from __future__ import annotations

import asyncio

from slipstream.engine.results import RequestOutput


class Mailbox:
    """Results are cumulative, so a later one replaces an earlier one that nobody has read yet."""

    def __init__(self) -> None:
        self._newest: RequestOutput | BaseException | None = None
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | BaseException) -> None:
        self._newest = item
        self._arrived.set()

    async def get(self) -> RequestOutput:
        await self._arrived.wait()
        item, self._newest = self._newest, None
        self._arrived.clear()
        if isinstance(item, BaseException):
            raise item
        assert item is not None
        return item
