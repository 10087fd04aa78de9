"""Watch: ends a handler whose client has gone or whose time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from slipstream.serve.http.errors import HttpError


class ClientGone(Exception):
    """Nobody is there to be answered."""

    cause = "disconnect"


class Watch:
    """A `with` block around the work of one request.

    When the client goes, or the deadline passes, the task inside is cancelled; the block then raises `ClientGone`, or
    the error that says whose time was up.
    """

    def __init__(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        seconds: float | None,
        left: float | None = None,
    ) -> None:
        """`seconds`: what the request may take in all; `left` of it, where some has passed."""
        self._receive = receive
        self._seconds = seconds
        self._left = seconds if left is None else left
        self._reason: Exception | None = None
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Watch:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        loop = asyncio.get_running_loop()
        self._listener = loop.create_task(self._listen())
        if self._seconds is not None and self._left is not None:
            fact = f"the request took longer than its {self._seconds:g} s"
            late = HttpError(408, f"{fact}; ask for less, or allow more (X-Request-Timeout)", code="deadline")
            self._timer = loop.call_later(max(0.0, self._left), self._give_up, late)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._listener.cancel()
        if self._timer is not None:
            self._timer.cancel()
        task, reason = self._task, self._reason
        # what knows itself, by a task or by a traceback, waits for the collector, and the request's body with it
        del self._listener, self._task, self._reason
        if reason is not None:
            task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                try:
                    raise reason from None
                finally:
                    del reason

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._give_up(ClientGone())

    def _give_up(self, reason: Exception) -> None:
        if not self._over and self._reason is None:
            self._reason = reason
            self._task.cancel()
