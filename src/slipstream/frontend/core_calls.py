"""CoreCalls: calls to the core that wait for a reply, by id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slipstream.transport.client import CoreClient
from slipstream.transport.frames import AbortedAll, Controlled, Inspected, ResetPrefixCache, ToCore

Reply = AbortedAll | ResetPrefixCache | Inspected | Controlled


class CoreCalls:
    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def ask(self, client: CoreClient, call: str, message: Callable[[str], ToCore]) -> Any:
        """Sends the message made from the id of the call, and returns its reply."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call] = waiter
        try:
            client.send(message(call))
            return await waiter
        finally:
            del self._waiting[call]

    def answer(self, reply: Reply) -> None:
        """Ends the call with its reply; that of `AbortAll` is a number."""
        waiter = self._waiting.get(reply.call)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply.count if isinstance(reply, AbortedAll) else reply)

    def fail(self, error: BaseException) -> None:
        """The core is lost: every call raises `error`."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
