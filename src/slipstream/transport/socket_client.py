"""SocketClient: the CoreClient of a core in another process."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import msgspec

from slipstream.base.errors import EngineClosed, EngineDead, InvalidParams, RequestTooLarge
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
    """Messages sent in one iteration of the event loop go out as one frame."""

    max_result: int | None = MAX_RESULT

    def __init__(self) -> None:
        self._frames = from_core_frames()
        self._listener: Listener | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._outbox: list[msgspec.Raw] = []
        self._early: list[FromCore] = []  # received before `listen`
        self._error: BaseException | None = None
        self.cause: str | None = None  # the core's own message about its failure
        self._closed = asyncio.Event()

    @classmethod
    async def connect(cls, sock: socket.socket) -> SocketClient:
        """Returns a client over a connected socket: one end of a socket pair, or of TCP to a core of another node."""
        loop = asyncio.get_running_loop()
        connect = loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        _, client = await connect(cls, sock=sock)
        return client

    @property
    def is_lost(self) -> bool:
        """Whether the core has exited or the connection is closed."""
        return self._error is not None

    def listen(self, listener: Listener) -> None:
        if self._listener is not None:
            return
        self._listener = listener
        if self._early:
            self._receive(self._early)
        if self._error is not None:
            listener.fail(self._error)

    def send(self, message: ToCore) -> None:
        # encoded here and not in `_flush`, so that an error is raised to the caller of this message only
        try:
            data = encoded(message)
        except TooLarge as error:
            raise RequestTooLarge(
                f"the request has {error.size} bytes, {MAX_FRAME} can be sent to the engine core; send less at once"
            ) from None
        except UnicodeEncodeError:
            raise InvalidParams(
                "a parameter has an unpaired surrogate, which UTF-8 cannot encode; give valid text"
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
            self._transport.abort()  # does not wait; the core aborts all requests of this front end
            await self._closed.wait()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            for data in frames(outbox):
                self._transport.write(data)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(self._frames.push(data))
        except FrameError as error:
            self._fail(EngineDead(f"data of the engine core cannot be decoded: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        self._fail(EngineDead("the engine core has ended; see its last lines in the log"))

    def _receive(self, messages: list[FromCore]) -> None:
        if self._listener is None:
            self._early += messages
            return
        self._listener.receive(messages)
        for message in messages:
            if isinstance(message, Failed):
                self.cause = message.cause
                self._fail(message.error())

    def _fail(self, error: BaseException) -> None:
        """Reports the first failure only: later ones are its consequences."""
        if self._error is None:
            self._error = error
            if self._listener is not None:
                self._listener.fail(error)
