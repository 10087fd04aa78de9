"""AsyncEngine: generation for asyncio programs. The core runs in a thread of its own beside the event loop."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from slipstream.config.options import make_options
from slipstream.engine.build import build
from slipstream.engine.core import EngineCore
from slipstream.engine.inputs import Message, Prompt
from slipstream.engine.outputs import OutputProcessor
from slipstream.engine.results import RequestOutput
from slipstream.engine.stream import Mailbox
from slipstream.errors import EngineClosed, UserError
from slipstream.messages import Abort, Output, Submit
from slipstream.params import SamplingParams


class AsyncEngine:
    """Many requests at once, each a stream of results.

        engine = AsyncEngine()
        async for result in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(result.outputs[0].text)

    Leaving the loop early aborts the request.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        built = build(make_options(model=None if model is None else str(model), **options))
        self.config = built.config
        self.tokenizer = built.tokenizer
        self.inputs = built.inputs
        self._outputs = OutputProcessor(built.tokenizer)
        self._mailboxes: dict[str, Mailbox] = {}
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._core = _CoreThread(built.core, self._deliver, self._fail)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        async for result in self._stream(prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt):
            yield result

    async def chat(
        self,
        messages: list[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        text = self.inputs.render_chat(messages, **template)
        async for result in self._stream(text, sampling_params, request_id, add_special_tokens=False):
            yield result

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, finished as aborted."""
        track = self._outputs.tracks.get(request_id)
        self._core.send(Abort(request_id))
        if track is not None:
            self._outputs.drop(request_id)
            track.abort()
            self._mailboxes[request_id].put(track.result())

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._core.close)
        self._fail(EngineClosed("the engine was closed"))

    async def _stream(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, **submit: Any
    ) -> AsyncIterator[RequestOutput]:
        if self._failure is not None:
            raise self._failure
        self._loop = asyncio.get_running_loop()
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if name in self._mailboxes:
            raise UserError(f"request id {name!r} is in use; wait for it to end or choose another")
        message, text = self.inputs.submit(name, prompt, params, **submit)
        # open before the message leaves: the answer may be there before we look
        mailbox = self._mailboxes[name] = Mailbox()
        self._outputs.open(message, text, stream=True)
        finished = False
        try:
            await asyncio.wrap_future(self._core.send(message))
            while not finished:
                result = await mailbox.get()
                finished = result.finished
                yield result
        finally:
            if not finished:
                self._core.send(Abort(name))
            self._outputs.drop(name)
            del self._mailboxes[name]

    def _deliver(self, outputs: list[Output]) -> None:
        """Core thread: hand a step's outputs to the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, outputs)

    def _take(self, outputs: list[Output]) -> None:
        moved, aborts = self._outputs.process(outputs)
        for abort in aborts:
            self._core.send(abort)
        for track in moved:
            if mailbox := self._mailboxes.get(track.id):
                mailbox.put(track.result())

    def _fail(self, error: BaseException) -> None:
        """Any thread: the core is gone; everyone who waits hears why."""
        self._failure = error

        def tell() -> None:
            for mailbox in self._mailboxes.values():
                mailbox.put(error)

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)


class _CoreThread:
    """Steps the core while it has work, and sleeps on its inbox while it has none."""

    def __init__(self, core: EngineCore, deliver: Any, fail: Any) -> None:
        self.core = core
        self.inbox: queue.SimpleQueue[tuple[Submit | Abort | None, Future[None]]] = queue.SimpleQueue()
        self._deliver = deliver
        self._fail = fail
        self._ended = False
        self._gate = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="slipstream-core", daemon=True)
        self.thread.start()

    def send(self, message: Submit | Abort | None) -> Future[None]:
        """The future tells whether the core took it."""
        future: Future[None] = Future()
        with self._gate:
            if self._ended:
                future.set_exception(EngineClosed("the engine was closed"))
            else:
                self.inbox.put((message, future))
        return future

    def close(self) -> None:
        if not self._ended:
            self.send(None)
        self.thread.join()

    def _run(self) -> None:
        try:
            while self._receive():
                if self.core.has_work() and (outputs := self.core.step()):
                    self._deliver(outputs)
        except Exception as error:  # handed to every waiting reader
            self._fail(error)
        finally:
            with self._gate:
                self._ended = True  # nothing is put from here on
            while not self.inbox.empty():
                future = self.inbox.get()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineClosed("the engine was closed"))
            self.core.close()

    def _receive(self) -> bool:
        """Take in what has come; wait for it if there is nothing else to do. False ends the loop."""
        while not (self.inbox.empty() and self.core.has_work()):
            message, future = self.inbox.get()
            if not future.set_running_or_notify_cancel():
                continue  # whoever sent it has gone
            try:
                if isinstance(message, Submit):
                    self.core.submit(message)
                elif isinstance(message, Abort):
                    self.core.abort(message)
                future.set_result(None)
            except Exception as error:  # this request's alone
                future.set_exception(error)
            if message is None:
                return False
        return True
