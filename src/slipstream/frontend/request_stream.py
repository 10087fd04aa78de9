"""RequestStream: the requests of one reader, to which a Mailbox reports which of them have new output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from slipstream.contracts.messages import Submit
from slipstream.frontend.inputs import PreparedPrompt
from slipstream.frontend.request_state import RequestState
from slipstream.frontend.served import ServedModel

State = TypeVar("State", bound=RequestState)


class Mailbox:
    """Names the requests that have new output since the reader last looked.

    It holds no results: the reader takes what is new from the RequestState. So the outputs of several steps become one
    increment for a slow reader, no queue grows, and no request waits for a reader.
    """

    __slots__ = ("_updated", "_error", "_waiter")

    def __init__(self) -> None:
        self._updated: dict[str, RequestState] = {}
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, state: RequestState) -> None:
        self._updated[state.id] = state
        self._wake()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error  # the first is the cause
        self._wake()

    async def get(self) -> list[Any]:
        """Returns the states updated since the last call; at least one. Raises if the stream has failed."""
        while not self._updated and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._updated:
            updated, self._updated = list(self._updated.values()), {}
            return updated
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PromptSender(Protocol):
    """The part of `RequestRouter` that a RequestStream uses."""

    def send(self, stream: RequestStream[Any], message: Submit, text: str | None) -> None: ...
    def end(self, stream: RequestStream[Any], *, failed: bool) -> None: ...
    def num_queued(self, served: ServedModel) -> int: ...
    async def until_one_starts(self) -> None: ...


class RequestStream(Generic[State]):
    """One or more requests with one reader. Iterating gives the states with new output, until all are finished.

    A context manager: leaving the `with` block aborts the requests that are not finished.
    """

    def __init__(
        self, router: PromptSender, served: ServedModel, mailbox: Mailbox, *, streaming: bool, caller: str = ""
    ) -> None:
        """Without `streaming`, the mailbox names finished requests only. `caller`: see `Submit`."""
        self._router = router
        self.served = served
        self.mailbox = mailbox
        self.streaming = streaming
        self.caller = caller
        self.states: list[State] = []

    async def __aiter__(self) -> AsyncIterator[list[State]]:
        num_open = len(self.states)
        while num_open:
            updated = await self.mailbox.get()
            num_open -= sum(state.finished for state in updated)
            yield updated

    async def wait(self) -> list[State]:
        """Returns all states when all requests are finished."""
        num_open = len(self.states)
        while num_open:
            num_open -= sum(state.finished for state in await self.mailbox.get())
        return self.states

    async def feed(
        self, submits: Sequence[PreparedPrompt], advance: Callable[[State], None] = lambda state: None
    ) -> list[State]:
        """Sends any number of prompts, and returns all states when all requests are finished. `advance` is called with
        each that is.

        Prompts that exceed the core's `max_waiting` are sent as the queue empties, also where other callers fill it.
        """
        router, limit = self._router, self.served.description.max_waiting or len(submits)
        num_sent = num_open = 0
        while True:
            room = max(limit - router.num_queued(self.served), 0)
            for message, text in submits[num_sent : num_sent + room]:
                router.send(self, message, text)
                num_sent, num_open = num_sent + 1, num_open + 1
            if num_open:
                for state in await self.mailbox.get():
                    if state.finished:
                        num_open -= 1
                        advance(state)
            elif num_sent < len(submits):
                await router.until_one_starts()
            else:
                return self.states

    def __enter__(self) -> RequestStream[State]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._router.end(self, failed=kind is not None)
