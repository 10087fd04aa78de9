"""WriteWatch: ends a connection whose client does not read its response.

A response that is written waits in the transport's buffer, also after the connection is closed, until the client has
read it: a client that never reads would hold the socket, and the response, for ever.
"""

from __future__ import annotations

import asyncio

_SECONDS = 60.0  # without a byte that the client takes


class WriteWatch:
    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._size = 0  # bytes in the buffer at the last look
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on the buffer must shrink."""
        if self._timer is None:
            self._set_timer()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self._size = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._look) if self._size else None

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() < self._size:
            self._set_timer()
        else:
            self._timer = None
            self._transport.abort()
