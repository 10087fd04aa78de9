"""ReplicaLoop: the calls of `LLM` over replicas in other processes, with the interface of SyncLoop.

An event loop in a thread of this process receives the outputs. Calls of several threads run at the same time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from slipstream.base.errors import EngineClosed, InvalidOption
from slipstream.config.options import Options
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.core_state import check_process
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.request_state import RequestStream
from slipstream.front.results import RequestOutput
from slipstream.front.served import ServedModel
from slipstream.front.vllm_names import refuse_running_reset
from slipstream.transport.replicas import CountedSource, ReplicaClient, open_replicas

T = TypeVar("T")


class ReplicaLoop:
    as_lists = True  # prompts are encoded for another process

    def __init__(self, options: Sequence[Options]) -> None:
        """Starts the replicas and waits until all are ready."""
        source = open_replicas(options)
        self.closed = False
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slipstream-replicas", daemon=True)
        self._thread.start()
        try:
            self.engine: AsyncEngine = self._call(self._open(source))
        except BaseException:
            self._stop()
            raise

    async def _open(self, source: CountedSource) -> AsyncEngine:
        engine = AsyncEngine(client=ReplicaClient(source, source.count))
        try:
            await engine.until_ready()
        except BaseException:
            await engine.close()
            raise
        return engine

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Calls do not exclude each other: the replicas batch what all threads send."""
        self.check_open()
        yield

    def run(
        self,
        served: ServedModel,
        submits: Iterable[PreparedPrompt],
        advance: Callable[[Any], None] = lambda state: None,
        *,
        follows: bool = False,
    ) -> list[Any]:
        """Waits until all prompts are finished. Returns their states in the order of the prompts; see SyncLoop."""
        self.check_open()
        prepared = list(submits)
        finished: SimpleQueue[Any] = SimpleQueue()  # states; None: there are no more

        async def feed() -> list[Any]:
            try:
                with self.engine.read((), served.description.name, streaming=False) as stream:
                    return await stream.feed(prepared, finished.put)
            finally:
                finished.put(None)

        def follow() -> None:
            """In the caller's thread: an error of `advance` in the event loop's would end all calls."""
            while (state := finished.get()) is not None:
                advance(state)

        return self._call(feed(), follow)

    def may_follow(self, served: ServedModel, submits: Sequence[PreparedPrompt]) -> bool:
        """Prompts are tokenised before they are sent."""
        return False

    def stream(self, served: ServedModel, prepared: PreparedPrompt) -> Iterator[RequestOutput]:
        """Yields the results of one request as they grow. Closing the iterator aborts the request."""
        self.check_open()

        async def begin() -> RequestStream[Any]:
            return self.engine.read([prepared], served.description.name)

        async def following(stream: RequestStream[Any]) -> tuple[RequestOutput, bool]:
            (state,) = await stream.mailbox.get()
            return state.result(), state.finished

        stream = self._call(begin())
        try:
            finished = False
            while not finished:
                result, finished = self._call(following(stream))
                yield result
        finally:
            # may run in the garbage collector, in any thread, so it does not wait
            if not self.closed:
                self._loop.call_soon_threadsafe(lambda: self.engine.end(stream, failed=False))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> None:
        if reset_running_requests:
            refuse_running_reset()
        self.check_open()
        self._call(self.engine.reset_prefix_cache())

    def sleep(self, level: int, mode: str) -> None:
        self._refuse()

    def wake_up(self, tags: Sequence[str] | None) -> None:
        self._refuse()

    def update_weights(self, source: Any, model: str | None) -> None:
        self._refuse()

    def _refuse(self) -> None:
        raise InvalidOption("replicas do not sleep and keep their weights; set data_parallel_size to 1")

    def close(self) -> None:
        """Ends the replicas. Calls raise from now on."""
        if not self.closed:
            self.closed = True
            asyncio.run_coroutine_threadsafe(self.engine.close(), self._loop).result()
            self._stop()

    def check_open(self) -> None:
        check_process(self.pid)
        if self.closed:
            raise EngineClosed("this LLM was closed; make a new one")

    def _call(self, coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Runs a coroutine on the event loop. An interrupt cancels it, which aborts its requests."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            meanwhile()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
