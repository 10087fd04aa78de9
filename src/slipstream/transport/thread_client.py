"""ThreadClient: the CoreClient of a core in a thread of this process."""

from __future__ import annotations

import asyncio
import queue
import threading

from slipstream.contracts.messages import Abort, Submit, SubmitAll
from slipstream.engine.lanes import Lanes
from slipstream.transport.admission import submit
from slipstream.transport.client import Listener
from slipstream.transport.control import control
from slipstream.transport.frames import (
    AbortAll,
    AbortedAll,
    Begun,
    Control,
    FromCore,
    Inspect,
    ResetPrefixCache,
    ToCore,
)
from slipstream.transport.inspection import Inspector

_LOOK_SECONDS = 1.0  # between two looks of an idle core at other processes that share its model


class ThreadClient:
    """The thread steps the core while it has requests, and blocks on the inbox while it has none."""

    max_result: int | None = None

    def __init__(self, core: Lanes) -> None:
        self.core = core
        self._inspector = Inspector(core)
        self.inbox: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entered = threading.Event()
        self.thread = threading.Thread(target=self._run, name="slipstream-core", daemon=True)
        self.thread.start()
        self._entered.wait()

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()

    def send(self, message: ToCore) -> None:
        self.inbox.put(message)

    async def close(self) -> None:
        self.inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self.thread.join)

    def _run(self) -> None:
        self.core.enter_thread()
        self._entered.set()
        try:
            while self._receive():
                self._inspector.drop_unread()
                if self.core.has_requests():
                    outputs = self.core.step()
                    if (begun := self.core.take_begun()) or outputs:
                        self._send_to_listener([*([Begun(begun)] if begun else ()), *outputs])
        except Exception as error:  # the listener fails every open stream with it
            self._call("fail", error)
        finally:
            self.core.close()

    def _receive(self) -> bool:
        """Handles the messages of the inbox; blocks for one where the core has no requests. False ends the loop."""
        seconds = _LOOK_SECONDS if self.core.files else None
        while not (self.inbox.empty() and self.core.has_requests()):
            try:
                message = self.inbox.get(timeout=seconds)
            except queue.Empty:
                continue
            if message is None:
                return False
            if isinstance(message, Submit | SubmitAll):
                if refused := submit(self.core, message):
                    self._send_to_listener([*refused])
            elif isinstance(message, Abort):
                self.core.abort(message)
            elif isinstance(message, AbortAll):
                self._send_to_listener([AbortedAll(message.call, 0)])  # there is no other front end
            elif isinstance(message, ResetPrefixCache):
                self.core.reset_prefix_cache()
                self._send_to_listener([message])
            elif isinstance(message, Inspect):
                self._send_to_listener([self._inspector.answer(message)])
            elif isinstance(message, Control):
                outputs, answer = control(self.core, message)
                self._send_to_listener([*outputs, answer])
        return True

    def _send_to_listener(self, messages: list[FromCore]) -> None:
        self._call("receive", messages)

    def _call(self, method: str, argument: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(getattr(self._listener, method), argument)
            except RuntimeError:  # the loop was closed meanwhile
                pass
