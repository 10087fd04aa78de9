"""Reading: one or more requests under way, as their one reader sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from slipstream.frontend.mailbox import Mailbox
from slipstream.frontend.request_state import RequestState
from slipstream.frontend.served import ServedModel
from slipstream.messages import Submit

if TYPE_CHECKING:
    from slipstream.frontend.router import RequestRouter


class RequestStream:
    """Iterating gives, each time, the requests that moved since the last time, until all have ended.

    To be used in a `with` block: what has not ended when the block is left is aborted.
    """

    def __init__(
        self, desk: RequestRouter, served: ServedModel, mailbox: Mailbox, *, stream: bool, caller: str = ""
    ) -> None:
        """Without `stream` it hears only of ends. `caller`: see `Submit`."""
        self._desk = desk
        self.served = served
        self.mailbox = mailbox
        self.stream = stream
        self.caller = caller
        self.tracks: list[RequestState] = []

    async def __aiter__(self) -> AsyncIterator[list[RequestState]]:
        num_open = len(self.tracks)
        while num_open:
            moved = await self.mailbox.get()
            num_open -= sum(track.finished for track in moved)
            yield moved

    async def wait(self) -> list[RequestState]:
        """All of them, once they have ended."""
        num_open = len(self.tracks)
        while num_open:
            num_open -= sum(track.finished for track in await self.mailbox.get())
        return self.tracks

    async def feed(self, submits: Sequence[tuple[Submit, str | None]]) -> list[RequestState]:
        """Send prompts, and return them all once they have ended.

        However many they are: no more are sent than the core lets wait, and the others as room appears, also where
        it is strangers who fill the queue.
        """
        desk, most = self._desk, self.served.facts.max_waiting or len(submits)
        num_sent = num_open = 0
        while True:
            room = max(most - desk.num_queued(self.served), 0)
            for message, text in submits[num_sent : num_sent + room]:
                desk.send(self, message, text)
                num_sent, num_open = num_sent + 1, num_open + 1
            if num_open:
                num_open -= sum(track.finished for track in await self.mailbox.get())
            elif num_sent < len(submits):
                await desk.until_one_starts()
            else:
                return self.tracks

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._desk.leave(self, failed=kind is not None)
