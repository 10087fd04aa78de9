"""CoreClient: a front end's way to a core, wherever that runs.

A front end sends `Submit` and `Abort` and hears what happens as messages. It does not know whether the core is a thread
beside it (`thread_client.py`) or a process at the other end of a socket (`socket_client.py`).
"""

from __future__ import annotations

from typing import Protocol

from slipstream.transport.frames import FromCore, ToCore


class Listener(Protocol):
    """Who hears from a core. Both methods are called on the event loop."""

    def hear(self, messages: list[FromCore]) -> None: ...

    def fail(self, error: BaseException) -> None:
        """The core is gone, and nothing more will come."""


class CoreClient(Protocol):
    """All methods are called on the event loop."""

    max_result: int | None
    """Bytes of one result that the core can send; None: any number."""

    def listen(self, listener: Listener) -> None:
        """Tell this one, on the loop that runs now. May be called again, with the same."""

    def send(self, message: ToCore) -> None:
        """Never waits. Raises a UserError where the message cannot be encoded, and nothing is sent then. What cannot be
        delivered is answered by `Listener.fail`."""

    async def close(self) -> None: ...
