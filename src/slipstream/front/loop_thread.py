"""LoopThread: runs an asynchronous engine for calls of other threads, on an event loop in a thread of its own.

It has the interface by which `LLM` uses an `InlineClient`. Calls of several threads run at the same time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

from slipstream.base.errors import EngineClosed
from slipstream.base.processes import check_process
from slipstream.front.async_engine import AsyncEngine
from slipstream.transport.client import CoreClient
from slipstream.transport.inline import CallingBack

S = TypeVar("S")
T = TypeVar("T")


class LoopThread:
    def __init__(self, connect: Callable[[], CoreClient]) -> None:
        """Starts an engine over the client that `connect` makes in the thread, and waits until it is ready."""
        self.closed = False
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slipstream-replicas", daemon=True)
        self._thread.start()
        try:
            self.engine: AsyncEngine = self.call(self._open(connect))
        except BaseException:
            self._stop()
            raise

    async def _open(self, connect: Callable[[], CoreClient]) -> AsyncEngine:
        engine = AsyncEngine(client=connect())
        try:
            await engine.until_ready()
        except BaseException:
            await engine.close()
            raise
        return engine

    def call(self, coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Returns the result of a coroutine. An interrupt cancels it, which aborts its requests. `meanwhile` is called
        in this thread."""
        try:
            self.check_open()
        except EngineClosed:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            meanwhile()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_back(self, make: CallingBack[S, T], advance: Callable[[S], None]) -> T:
        """As `call`. `make` gets a function for the coroutine to call, and `advance` is called in this thread with what
        it was given: an error in the event loop would end all calls."""
        given: SimpleQueue[tuple[S] | None] = SimpleQueue()  # None: there is no more

        async def run() -> T:
            try:
                return await make(lambda value: given.put((value,)))
            finally:
                given.put(None)

        def follow() -> None:
            while (value := given.get()) is not None:
                advance(*value)

        return self.call(run(), follow)

    def do(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self.call(run())

    def later(self, function: Callable[[], None], *, in_reader: bool) -> None:
        """Calls the function without waiting: garbage collection may call this, in any thread."""
        if not self.closed:
            self._loop.call_soon_threadsafe(function)

    def check_open(self) -> None:
        check_process(self.pid)
        if self.closed:
            raise EngineClosed("this LLM was closed; make a new one")

    def check_no_step(self) -> None:
        """Steps are in other processes."""

    def shut_down(self) -> None:
        """Ends the replicas. Calls raise from now on."""
        if not self.closed:
            self.closed = True
            asyncio.run_coroutine_threadsafe(self.engine.close(), self._loop).result()
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
