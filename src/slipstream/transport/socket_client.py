"""A core in another process: the CoreClient at this end of the socket."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import msgspec

from slipstream.errors import EngineClosed, EngineDead, InvalidParams, RequestTooLarge
from slipstream.transport.client import Listener
from slipstream.transport.frames import (
    MAX_FRAME,
    MAX_RESULT,
    Failed,
    FrameError,
    FromCore,
    ToCore,
    TooLarge,
    encoded,
    frames,
    from_core_frames,
)


class SocketClient(asyncio.Protocol):
    """Messages sent in one turn of the event loop leave as one frame."""

    max_result: int | None = MAX_RESULT

    def __init__(self) -> None:
        self._frames = from_core_frames()
        self._listener: Listener | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._outbox: list[msgspec.Raw] = []
        self._early: list[FromCore] = []  # came before anybody listened
        self._error: BaseException | None = None
        self.cause: str | None = None  # of the core's end, in its own words
        self._closed = asyncio.Event()

    @classmethod
    async def connect(cls, sock: socket.socket) -> SocketClient:
        """Over one end of a socket pair whose other end the core has."""
        _, client = await asyncio.get_running_loop().create_unix_connection(cls, sock=sock)
        return client

    @property
    def is_lost(self) -> bool:
        """Whether the core has ended, or the line to it."""
        return self._error is not None

    def listen(self, listener: Listener) -> None:
        if self._listener is not None:
            return
        self._listener = listener
        if self._early:
            self._hear(self._early)
        if self._error is not None:
            listener.fail(self._error)

    def send(self, message: ToCore) -> None:
        # encoded here, so that whoever brought what cannot be encoded hears of it, and nobody else
        try:
            data = encoded(message)
        except TooLarge as error:
            raise RequestTooLarge(
                f"the request has {error.size} bytes, {MAX_FRAME} can be sent to the engine core; send less at once"
            ) from None
        except UnicodeEncodeError:
            raise InvalidParams(
                "a parameter holds half of a surrogate pair, which is no character; give text that is UTF-8"
            ) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidParams(f"a parameter cannot be sent to the engine core: {error}; give plain values") from None
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(data)

    async def close(self) -> None:
        if self._error is None:
            self._error = EngineClosed("the engine was closed")
        if self._transport is not None:
            self._transport.abort()  # waits for nobody; the core forgets all requests of a front end that has gone
            await self._closed.wait()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            for data in frames(outbox):
                self._transport.write(data)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one too, without saying so

    def data_received(self, data: bytes) -> None:
        try:
            self._hear(self._frames.push(data))
        except FrameError as error:
            self._fail(EngineDead(f"what the engine core sent cannot be read: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        self._fail(EngineDead("the engine core has ended; see its last lines in the log"))

    def _hear(self, messages: list[FromCore]) -> None:
        if self._listener is None:
            self._early += messages
            return
        self._listener.hear(messages)
        for message in messages:
            if isinstance(message, Failed):
                self.cause = message.cause
                self._fail(EngineDead(message.cause))

    def _fail(self, error: BaseException) -> None:
        """The first failure counts: the ones after it are its consequences."""
        if self._error is None:
            self._error = error
            if self._listener is not None:
                self._listener.fail(error)
