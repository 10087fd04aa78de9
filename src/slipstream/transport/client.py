"""CoreClient: the interface by which a front end sends messages to a core and receives its messages.

The core is a thread of the same process (`thread_client.py`) or another process (`socket_client.py`).
"""

from __future__ import annotations

from typing import Protocol

from slipstream.transport.frames import FromCore, ToCore


class Listener(Protocol):
    """Receives the messages of a core. Both methods are called on the event loop."""

    def receive(self, messages: list[FromCore]) -> None: ...

    def fail(self, error: BaseException) -> None:
        """The core is lost; no more messages will come."""


class CoreClient(Protocol):
    """All methods are called on the event loop."""

    max_result: int | None
    """The largest result in bytes that the core can send; None: no limit."""

    def listen(self, listener: Listener) -> None:
        """Sets the listener, which is called on the running loop. May be called again with the same listener."""

    def send(self, message: ToCore) -> None:
        """Queues a message without waiting. Raises UserError if it cannot be encoded; then nothing is sent. Where it
        cannot be delivered, `Listener.fail` is called."""

    async def close(self) -> None: ...
