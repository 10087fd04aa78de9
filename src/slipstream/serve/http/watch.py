"""Watch: cancels a handler when its client disconnects or its deadline passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from slipstream.serve.http.errors import HTTPException


class ClientDisconnect(Exception):
    """The client has closed the connection."""

    cause = "disconnect"


class Watch:
    """A context manager around the handler of one request.

    When the client disconnects or the deadline passes, the task is cancelled, and the `with` block raises
    `ClientDisconnect`, or an error with status 408.
    """

    def __init__(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        seconds: float | None,
        left: float | None = None,
    ) -> None:
        """`seconds`: the request's whole time limit; `left`: the part that remains, all of it by default."""
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
            late = HTTPException(408, f"{fact}; send less, or raise X-Request-Timeout", code="deadline")
            self._timer = loop.call_later(max(0.0, self._left), self._cancel, late)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._listener.cancel()
        if self._timer is not None:
            self._timer.cancel()
        task, reason = self._task, self._reason
        # breaks reference cycles through the task and the traceback, which would keep the request's body in memory
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
        self._cancel(ClientDisconnect())

    def _cancel(self, reason: Exception) -> None:
        if not self._over and self._reason is None:
            self._reason = reason
            self._task.cancel()
