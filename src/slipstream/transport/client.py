"""CoreClient: the interface by which a front end sends messages to a core and receives its messages.

The core is a thread of the same process (ThreadClient) or another process (`sockets.py`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from slipstream.base.errors import EngineDead, SlipstreamError
from slipstream.contracts.messages import Abort, Output, Submit, SubmitAll
from slipstream.engine.lanes import Lanes
from slipstream.record.step_log import StepLog, StepTimes, stop
from slipstream.transport.frames import (
    AbortAll,
    AbortedAll,
    Begun,
    Control,
    Controlled,
    FromCore,
    Inspect,
    Inspected,
    Refused,
    ResetPrefixCache,
    ToCore,
)


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


# ThreadClient: the CoreClient of a core in a thread of this process.

_LOOK_SECONDS = 1.0  # between two looks of an idle core at other processes that share its model


class ThreadClient:
    """The thread steps the core while it has requests, and blocks on the inbox while it has none."""

    max_result: int | None = None

    def __init__(self, core: Lanes) -> None:
        self.core = core
        self._server = CoreServer(core)
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
                self._server.inspector.drop_unread()
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
            if replies := self._server.handle(message):
                self._send_to_listener(replies)
        return True

    def _send_to_listener(self, messages: list[FromCore]) -> None:
        self._call("receive", messages)

    def _call(self, method: str, argument: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(getattr(self._listener, method), argument)
            except RuntimeError:  # the loop was closed meanwhile
                pass


log = logging.getLogger("slipstream.core")


class CoreServer:
    """Executes the messages of front ends, in this process or in others, on the lanes of a core."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.inspector = Inspector(lanes)

    def handle(self, message: ToCore) -> list[FromCore]:
        """Returns the replies to the sender, as if there were no other front end."""
        if isinstance(message, Submit | SubmitAll):
            return [*submit(self.lanes, message)]
        if isinstance(message, Abort):
            self.lanes.abort(message)
        elif isinstance(message, AbortAll):
            return [AbortedAll(message.call, 0)]
        elif isinstance(message, ResetPrefixCache):
            if message.preempts:
                return [*self.lanes.sleeper.preempt_all(), message]
            self.lanes.reset_prefix_cache()
            return [message]
        elif isinstance(message, Inspect):
            return [self.inspector.answer(message)]
        elif isinstance(message, Control):
            return control(self.lanes, message)
        return []


def submit(lanes: Lanes, message: Submit | SubmitAll) -> list[Refused]:
    """Returns refusals; an empty list where the core accepted the prompts.

    A SlipstreamError refuses the request and has changed nothing. Any other exception is a bug in the core: its
    traceback is logged. If the core's invariants still hold, only this request fails, as an internal error. If they do
    not, all later results could be wrong, so EngineDead is raised.
    """
    try:
        lanes.submit(*message.submits)
    except EngineDead:
        raise
    except SlipstreamError as error:
        return [Refused.of(each.request_id, error) for each in message.submits]
    except Exception as error:
        log.error("a request failed inside the engine core", exc_info=error)
        try:
            lanes.check()
        except Exception as broken:
            cause = f"{type(error).__name__}: {error}"
            raise EngineDead(
                f"a request broke an invariant of the engine core ({broken}); it failed with {cause}"
            ) from error
        return [Refused.of(each.request_id, error) for each in message.submits]
    return []


# Executes `Control` messages: sleep, wake up, and weights from files.


def control(lanes: Lanes, message: Control) -> list[FromCore]:
    """Returns the outputs of steps that were in flight, and the answer. An error of the user changes nothing; any other
    error may leave the device without its memory, so EngineDead is raised."""
    outputs: list[Output] = []
    refused = None
    sleeper = lanes.sleeper
    try:
        if message.action == "sleep":
            outputs = sleeper.sleep(message.level)
        elif message.action == "wake_up":
            sleeper.wake_up(message.tags)
        elif message.action == "update_weights":
            outputs = sleeper.update_weights(message.path, message.model)
    except SlipstreamError as error:
        refused = Refused.of("", error)
    except Exception as error:
        log.error("%s failed", message.action, exc_info=error)
        raise EngineDead(f"{message.action} failed: {error}") from error
    return [*outputs, Controlled(message.call, sleeper.is_asleep, refused)]


# Answers a front end's questions about the steps of a core: the flight recorder's file, and times of steps.

KEPT_SECONDS = 30.0  # a step log without a reader is dropped after this time


class StepTable(msgspec.Struct, array_like=True):
    """Steps of all models."""

    models: list[str]
    next: int  # number of the next step
    steps: list[StepTimes]


class Inspector:
    def __init__(self, lanes: Lanes, clock: Callable[[], float] = time.monotonic) -> None:
        self._lanes = lanes
        self._clock = clock
        self._log: StepLog | None = None
        self._read = 0.0  # when the log was read last

    def answer(self, message: Inspect) -> Inspected:
        try:
            return Inspected(message.call, self._find(message))
        except Exception as error:  # a question must not end the engine
            return Inspected(message.call, b"", f"{type(error).__name__}: {error}")

    def drop_unread(self) -> None:
        """Stops logging where no front end has read the log for a while."""
        if self._log is not None and self._clock() - self._read > KEPT_SECONDS:
            stop(self._lanes.cores)
            self._log = None

    def _find(self, message: Inspect) -> bytes:
        if message.what == "steps":
            return self._steps(message.since)
        name = message.model or next(iter(self._lanes.cores))
        core = self._lanes.cores.get(name)
        if core is None:
            raise ValueError(f"there is no model {name}")
        if core.recorder is None:
            raise ValueError("nothing is recorded; start the engine with record_steps above 0")
        return core.recorder.take().encode(redact=message.redact)

    def _steps(self, since: int) -> bytes:
        self._read = self._clock()
        if self._log is None:
            self._log = StepLog(self._lanes.cores)
        log = self._log
        # a number beyond the last step is from an older log: start from the beginning of this one
        steps = [] if since < 0 else log.since(since if since <= log.num_steps else 0)
        return msgspec.msgpack.encode(StepTable(log.models, log.num_steps, steps))
