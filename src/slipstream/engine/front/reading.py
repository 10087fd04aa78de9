"""Reading: one or more requests under way, as their one reader sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

from slipstream.engine.front.outputs import Track
from slipstream.engine.front.stream import Mailbox

if TYPE_CHECKING:
    from slipstream.engine.front.frontend import AsyncEngine


class Reading:
    """Iterating gives, each time, the requests that moved since the last time, until all have ended.

    To be used in a `with` block: what has not ended when the block is left is aborted.
    """

    def __init__(self, engine: AsyncEngine, tracks: list[Track], mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self.tracks = tracks

    async def __aiter__(self) -> AsyncIterator[list[Track]]:
        num_open = len(self.tracks)
        while num_open:
            moved = await self._mailbox.get()
            num_open -= sum(track.finished for track in moved)
            yield moved

    async def wait(self) -> list[Track]:
        """All of them, once they have ended."""
        num_open = len(self.tracks)
        while num_open:
            num_open -= sum(track.finished for track in await self._mailbox.get())
        return self.tracks

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.leave(self, failed=kind is not None)
