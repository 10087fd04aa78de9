"""RequestRouter: sends prompts to the core, and routes the core's messages to the streams of the requests.

It also tracks the load of this front end; the state of the core itself is in its base, `CoreState`. It does not read
parameters.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, get_args

import msgspec

from slipstream.base.errors import EngineClosed, InvalidParams, RequestTooLarge, UserError
from slipstream.contracts.messages import Abort, Output, Submit, SubmitAll
from slipstream.front.core_state import CoreState, QueueLoad, wake
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.pooling_results import check_result_size
from slipstream.front.request_state import Mailbox, RequestState, RequestStream, open_state
from slipstream.front.served import ServedModel
from slipstream.metrics.stats import ModelStats
from slipstream.params.values import check_text
from slipstream.transport.client import CoreClient, StepTable
from slipstream.transport.frames import (
    AbortAll,
    AbortedAll,
    Begun,
    Control,
    Controlled,
    Failed,
    FromCore,
    Inspect,
    Inspected,
    Loading,
    ModelDescriptions,
    Pulse,
    Ready,
    Refused,
    ResetPrefixCache,
    ToCore,
)
from slipstream.transport.inline import InlineClient, interrupts_deferred, next_step

log = logging.getLogger("slipstream.front")


class RequestRouter(CoreState):
    """The listener of a `CoreClient`, which subclasses set. One thread at a time uses it: that of an event loop, or the
    one that has the turn of an `InlineClient`."""

    client: CoreClient

    def __init__(self) -> None:
        super().__init__()
        self.load = QueueLoad()
        self.stats: dict[str, ModelStats] = {}  # by model
        self.counts = True  # whether requests are counted in `load` and `stats`
        self.last_message_time = time.monotonic()
        self.stream_interval = 1  # tokens between two increments of a stream, after the first increment
        self.separates_callers = False  # whether callers share no cached prefixes
        self.id_prefix = f"{secrets.token_hex(4)}-"  # of request ids, which are unique among all front ends
        self._queue_waiters: list[asyncio.Future[None]] = []  # for a request to leave the queue
        self._end_waiters: list[asyncio.Future[None]] = []  # for all requests to end
        self._requests: dict[str, RequestState] = {}  # by request id: requests that have not ended
        self._named: dict[str, str] = {}  # by the name that a caller chose: the ids of these requests
        self._preparing: dict[str, bool] = {}  # by request id, prompts being tokenised: whether they were aborted
        self._calls: dict[str, Mailbox] = {}  # by id: calls to the core that wait for a reply
        self._request_numbers = itertools.count()

    @property
    def inline(self) -> InlineClient | None:
        """The client, if it steps the core in the thread of a call."""
        return self.client if isinstance(self.client, InlineClient) else None

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not self._requests

    # Sending

    def read(
        self,
        submits: Sequence[PreparedPrompt],
        model: str | None = None,
        *,
        streaming: bool = True,
        aborted: bool = False,
        caller: str = "",
        name: str | None = None,
    ) -> RequestStream[Any]:
        """Sends prompts, all or none, and returns the stream of their outputs.

        Without `streaming`, the stream has finished requests only. With `aborted` nothing is sent, and the requests
        finish as aborted. `caller`: see `Submit`. `name`: of a single prompt, for its results and `abort`.
        """
        self.check()
        check_text("caller", caller)
        self.client.listen(self)
        served = self.model(model)
        count, limit = sum(message.num_samples for message, _ in submits), served.description.max_waiting
        if limit is not None and count > limit:
            raise RequestTooLarge(
                f"{len(submits)} prompts have {count} samples, and the queue holds {limit}; send fewer at once, "
                "lower n, or raise max_waiting"
            )
        if name is not None and name in self._named:
            raise in_use(name)
        stream: RequestStream[Any] = RequestStream(
            self, served, self._mailbox(), streaming=streaming, caller=caller, name=name
        )
        stream.is_plain = (
            served.lora is None
            and len(self.models) < 2
            and not (caller or self.separates_callers)
            and self.client.max_result is None
        )
        messages = [self.open(stream, message, text) for message, text in submits]
        if aborted:
            for state in stream.states:
                self._abort(state)
        elif messages:
            self._send(stream, len(messages), messages[0] if len(messages) == 1 else SubmitAll(messages))
        return stream

    async def run(
        self,
        prompts: Iterable[PreparedPrompt],
        served: ServedModel,
        advance: Callable[[Any], None] = lambda state: None,
        *,
        caller: str = "",
    ) -> list[Any]:
        """Returns the states of all prompts when they are finished; see `RequestStream.feed`."""
        with self.read((), served.description.name, streaming=False, caller=caller) as stream:
            return await stream.feed(prompts, advance)

    def send(self, stream: RequestStream[Any], message: Submit, text: str | None) -> None:
        """Adds a prompt to a stream. Where it raises, the stream's requests are aborted."""
        self._send(stream, 1, self.open(stream, message, text))

    def _send(self, stream: RequestStream[Any], count: int, message: Submit | SubmitAll) -> None:
        """Sends the stream's last `count` prompts, or removes them where they cannot be sent."""
        try:
            self.client.send(message)
        except UserError:
            for state in stream.states[-count:]:
                self._close(state)
            del stream.states[-count:]
            raise

    def open(self, stream: RequestStream[Any], message: Submit, text: str | None) -> Submit:
        """Creates the state of a request, before its message is sent, since outputs may arrive at once. Returns the
        message for the core."""
        name = message.request_id
        if name in self._requests:
            self.end(stream, failed=True)
            raise in_use(name)
        if not stream.is_plain:
            message = self._addressed(message, stream)
        state = self._requests[name] = open_state(message, text, stream)
        if stream.name is not None:
            self._named[stream.name] = name
        stream.states.append(state)
        if self.counts:
            if (stats := self.stats.get(stream.served.base_name)) is None:
                stats = self.stats[stream.served.base_name] = ModelStats()
            state.count_begin(stats)
            self.load.enter(message.model, len(message.prompt_token_ids), message.caller)
        return message

    def _addressed(self, message: Submit, stream: RequestStream[Any]) -> Submit:
        """The message with the model, adapter and caller of the stream. Raises if its result would be too large."""
        served = stream.served
        if (limit := self.client.max_result) is not None:
            try:
                check_result_size(served.description, message, limit)
            except UserError:
                self.end(stream, failed=True)
                raise
        if served.lora is not None and message.lora is None:
            message = msgspec.structs.replace(message, lora=served.lora)
        if len(self.models) > 1 or stream.caller:
            model = served.base_name if len(self.models) > 1 else ""
            message = msgspec.structs.replace(message, model=model, caller=stream.caller)
        if self.separates_callers:
            message = msgspec.structs.replace(message, cache_salt=f"{stream.caller}\0{message.cache_salt}")
        return message

    def end(self, stream: RequestStream[Any], *, failed: bool) -> None:
        """Aborts the stream's unfinished requests. With `failed` also its late-interaction queries, which the core
        would keep for documents that never come."""
        with interrupts_deferred() if self.inline else nullcontext():
            for state in stream.states:
                if not state.finished or (failed and state.is_query):
                    self.client.send(Abort(state.id))
                    self._close(state)

    def _mailbox(self) -> Mailbox:
        return Mailbox(is_inline=self.inline is not None)

    def num_queued(self, served: ServedModel) -> int:
        """The number of this front end's prompts that wait for the model."""
        return self.load.queued_of[served.base_name if len(self.models) > 1 else ""]

    async def until_one_starts(self) -> None:
        """Returns when a prompt has left the queue; raises if the core is lost."""
        self.check()
        self._queue_waiters.append(waiter := asyncio.get_running_loop().create_future())
        await waiter
        self.check()

    # Aborting

    async def abort(self, request_id: str) -> None:
        """Ends a request. Its stream gets what was generated so far, with the finish reason abort."""
        self._abort_id(request_id)

    def _abort_id(self, request_id: str) -> None:
        if request_id in self._preparing:
            self._preparing[request_id] = True
            return
        request_id = self._named.get(request_id, request_id)
        state = self._requests.get(request_id)
        self.client.send(Abort(request_id))
        if state is not None:
            self._abort(state)

    def _abort(self, state: RequestState) -> None:
        state.abort()
        self._close(state)
        state.mailbox.put(state.id, state)

    async def abort_all(self) -> int:
        """Aborts every request of this front end. Returns their number."""
        return self._abort_own()

    def _abort_own(self) -> int:
        names = [*self._requests, *(name for name, aborted in self._preparing.items() if not aborted)]
        for name in names:
            self._abort_id(name)
        return len(names)

    async def abort_others(self) -> int:
        """Aborts every request of the other front ends of this core. Returns their number when all have replied."""
        reply: AbortedAll = await self.call(AbortAll)
        return reply.count

    async def until_idle(self) -> None:
        """Returns when every request has ended."""
        while self._requests:
            self.check()
            if self.inline:
                await next_step()
            else:
                self._end_waiters.append(waiter := asyncio.get_running_loop().create_future())
                await waiter

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Clears the prefix caches of all models. Running requests keep their pages, unless they are reset too: then
        they are computed again from their tokens."""
        await self.call(lambda call: ResetPrefixCache(call, reset_running_requests))

    async def call(self, message: Callable[[str], ToCore]) -> Any:
        """Sends a message, made from the id of the call, and waits for its reply."""
        self.check()
        self.client.listen(self)  # the reply comes to this event loop, also before the first request
        name = self.new_id()
        mailbox = self._calls[name] = self._mailbox()
        try:
            self.client.send(message(name))
            (reply,) = await mailbox.get()
            return reply
        finally:
            del self._calls[name]
            mailbox.forget_error()

    async def close(self) -> None:
        self.stop_opening()
        await self.client.close()
        for model in self.models.values():
            model.inputs.images.close()
        self.fail(EngineClosed("the engine was closed"))

    # Messages of the core

    def receive(self, messages: list[FromCore]) -> None:
        """Handles messages; tells the reader of a request when it has ended or an increment is due. An exception in a
        message does not stop the others, since each may end a request."""
        self.last_message_time = now = time.monotonic()
        requests, counts = self._requests, self.counts
        state: RequestState | None = None
        growing: dict[str, RequestState] = {}  # streams with new tokens, of several steps perhaps
        for message in messages:
            try:
                if not isinstance(message, Output):
                    self._handle(message)
                    now = time.monotonic()  # a prompt begins before its first output, also if both come together
                elif (state := requests.get(message.request_id)) is not None:  # else it ended with a step in flight
                    if state.take(message, now):
                        self.client.send(Abort(state.id, message.sample))  # a stop string ended the sample
                    if state.finished:
                        growing.pop(state.id, None)
                        self._close(state)
                        if state.refused is None:
                            state.mailbox.put(state.id, state)
                        else:
                            state.mailbox.fail(state.refused)
                    elif message.token_ids:
                        if state.queued and counts:
                            self._start(state)
                        if state.streaming:
                            growing[state.id] = state
            except Exception as error:
                if not isinstance(message, Output) or state is None:
                    log.exception("a message of the engine core could not be handled: %.200r", message)
                else:
                    growing.pop(state.id, None)
                    self._fail_request(state, error)
        for state in growing.values():
            if state.unread >= self.stream_interval:
                state.mailbox.put(state.id, state)

    def _fail_request(self, state: RequestState, error: Exception) -> None:
        """Aborts a request whose output raised an exception; its stream raises it."""
        log.error("the output of request %s could not be processed", state.id, exc_info=error)
        state.mailbox.fail(error)
        self.client.send(Abort(state.id))
        self._close(state)

    def _handle(self, message: FromCore) -> None:
        if isinstance(message, Begun):
            for name in message.request_ids:
                if (state := self._requests.get(name)) is not None:
                    state.begun = self.last_message_time
        elif isinstance(message, Refused):
            if (state := self._requests.get(message.request_id)) is not None:
                state.mailbox.fail(message.error())
        elif isinstance(message, Pulse | Loading | ModelDescriptions | Ready):
            self.note(message)
        elif isinstance(message, AbortAll):
            self.client.send(AbortedAll(message.call, self._abort_own()))
        elif not isinstance(message, Failed | Output) and (mailbox := self._calls.get(message.call)) is not None:
            mailbox.put(message.call, message)

    def fail(self, error: BaseException) -> None:
        """The core is lost: every stream and every waiting call raises `error`."""
        cause = error if self.failure is None else self.failure
        for mailbox in [*(state.mailbox for state in self._requests.values()), *self._calls.values()]:
            mailbox.fail(cause)
        super().fail(error)
        wake(self._queue_waiters)
        wake(self._end_waiters)

    def new_id(self, name: str | None = None) -> str:
        """A request id that is never used again: outputs of a request that was aborted may still come. `name`: what the
        caller calls the request."""
        new = f"{self.id_prefix}{next(self._request_numbers)}"
        return new if name is None else f"{name}-{new}"

    def _start(self, state: RequestState) -> None:
        state.queued = False
        message = state.message
        self.load.start(message.model, len(message.prompt_token_ids), message.caller)
        if self._queue_waiters:
            wake(self._queue_waiters)

    def _close(self, state: RequestState) -> None:
        if self._requests.get(state.id) is state:  # its id may be that of a newer request
            del self._requests[state.id]
            if state.name != state.id:
                del self._named[state.name]
            if self._end_waiters and not self._requests:
                wake(self._end_waiters)
            if self.counts:
                if state.queued:
                    self._start(state)
                self.load.finish()
                state.count_end()


def in_use(name: str) -> UserError:
    return UserError(f"request id {name!r} is in use; wait for it to end or choose another")


# A front end's questions to the core: a recording of the last steps, and times of steps.

_DECODER = msgspec.msgpack.Decoder(StepTable)


async def read_record(router: RequestRouter, model: str = "", *, redact: bool = False) -> bytes:
    """The content of a file for `slipstream replay`. Raises UserError if nothing is recorded."""
    return await _ask(router, "record", model=model, redact=redact)


async def read_steps(router: RequestRouter, since: int = 0) -> StepTable:
    """Steps from this number on; none if it is below 0.

    The core logs steps from the first call on, as long as calls continue.
    """
    return _DECODER.decode(await _ask(router, "steps", since=since))


async def _ask(router: RequestRouter, what: Literal["record", "steps"], **more: Any) -> bytes:
    answer: Inspected = await router.call(lambda call: Inspect(call, what, **more))
    if answer.error is not None:
        raise UserError(answer.error)
    return answer.data


# A front end's commands to the core: sleep, wake up, and weights from files.


async def control(
    router: RequestRouter, action: Literal["sleep", "wake_up", "update_weights", "ask"], **more: Any
) -> bool:
    """Sends a `Control` message. Returns whether the engine is asleep afterwards; raises the core's error."""
    answer: Controlled = await router.call(lambda call: Control(call, action, **more))
    if answer.refused is not None:
        raise answer.refused.error()
    return answer.is_asleep


SleepMode = Literal["abort", "wait", "keep"]


async def fall_asleep(router: RequestRouter, level: int, mode: SleepMode) -> None:
    """`mode`: requests are aborted, or awaited, or kept and computed again later."""
    if mode not in get_args(SleepMode):
        raise InvalidParams(f"mode is {mode!r:.50}; give abort, wait or keep", param="mode")
    if mode == "abort":
        await router.abort_all()
    if mode == "wait":
        await router.until_idle()
    await control(router, "sleep", level=level)
