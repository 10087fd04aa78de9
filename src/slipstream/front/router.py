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
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from slipstream.base.errors import EngineClosed, RequestTooLarge, UserError
from slipstream.contracts.messages import Abort, Output, Submit, SubmitAll
from slipstream.front.core_state import CoreState, QueueLoad, wake
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.pooling_results import check_result_size
from slipstream.front.request_state import Mailbox, OutputProcessor, RequestState, RequestStream
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

log = logging.getLogger("slipstream.front")


class RequestRouter(CoreState):
    """The listener of a `CoreClient`, which subclasses set."""

    client: CoreClient

    def __init__(self) -> None:
        super().__init__()
        self.load = QueueLoad()
        self.stats: dict[str, ModelStats] = {}  # by model
        self.last_message_time = time.monotonic()
        self.stream_interval = 1  # tokens between two increments of a stream, after the first increment
        self.separates_callers = False  # whether callers share no cached prefixes
        self._queue_waiters: list[asyncio.Future[None]] = []  # for a request to leave the queue
        self._outputs = OutputProcessor()
        self._mailboxes: dict[str, Mailbox] = {}  # by request id
        self._preparing: dict[str, bool] = {}  # by request id, prompts being tokenised: whether they were aborted
        self._calls = CoreCalls()
        self._request_numbers = itertools.count()
        self._prefix = secrets.token_hex(4)

    # Sending

    def read(
        self,
        submits: Sequence[PreparedPrompt],
        model: str | None = None,
        *,
        streaming: bool = True,
        aborted: bool = False,
        caller: str = "",
    ) -> RequestStream[Any]:
        """Sends prompts, all or none, and returns the stream of their outputs.

        Without `streaming`, the stream has finished requests only. With `aborted` nothing is sent, and the requests
        finish as aborted. `caller`: see `Submit`.
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
        stream: RequestStream[Any] = RequestStream(self, served, Mailbox(), streaming=streaming, caller=caller)
        messages = [self._enter(stream, message, text) for message, text in submits]
        if aborted:
            for state in stream.states:
                self._abort(state)
        elif messages:
            self._send(stream, len(messages), messages[0] if len(messages) == 1 else SubmitAll(messages))
        return stream

    def send(self, stream: RequestStream[Any], message: Submit, text: str | None) -> None:
        """Adds a prompt to a stream. Where it raises, the stream's requests are aborted."""
        self._send(stream, 1, self._enter(stream, message, text))

    def _send(self, stream: RequestStream[Any], count: int, message: Submit | SubmitAll) -> None:
        """Sends the stream's last `count` prompts, or removes them where they cannot be sent."""
        try:
            self.client.send(message)
        except UserError:
            for state in stream.states[-count:]:
                self._outputs.drop(state.id)
                self._close(state)
            del stream.states[-count:]
            raise

    def _enter(self, stream: RequestStream[Any], message: Submit, text: str | None) -> Submit:
        """Creates the request's state before the message is sent, since outputs may arrive at once."""
        name, served = message.request_id, stream.served
        if name in self._mailboxes:
            self.end(stream, failed=True)
            raise in_use(name)
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
        self._mailboxes[name] = stream.mailbox
        state = self._outputs.open(message, text, streaming=stream.streaming, model=served)
        if (stats := self.stats.get(served.base_name)) is None:
            stats = self.stats[served.base_name] = ModelStats()
        state.count_begin(stats)
        stream.states.append(state)
        self.load.enter(message.model, len(message.prompt_token_ids), message.caller)
        return message

    def end(self, stream: RequestStream[Any], *, failed: bool) -> None:
        """Aborts the stream's unfinished requests. With `failed` also its late-interaction queries, which the core
        would keep for documents that never come."""
        for state in stream.states:
            if not state.finished or (failed and state.is_query):
                self.client.send(Abort(state.id))
            self._outputs.drop(state.id)
            self._close(state)

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
        state = self._outputs.states.get(request_id)
        self.client.send(Abort(request_id))
        if state is not None:
            self._abort(state)

    def _abort(self, state: RequestState) -> None:
        self._outputs.drop(state.id)
        state.abort()
        mailbox = self._mailboxes[state.id]
        self._close(state)
        mailbox.put(state)

    async def abort_all(self) -> int:
        """Aborts every request of this front end. Returns their number."""
        return self._abort_own()

    def _abort_own(self) -> int:
        names = [*self._outputs.states, *(name for name, aborted in self._preparing.items() if not aborted)]
        for name in names:
            self._abort_id(name)
        return len(names)

    async def abort_others(self) -> int:
        """Aborts every request of the other front ends of this core. Returns their number when all have replied."""
        aborted: int = await self.call(AbortAll)
        return aborted

    async def reset_prefix_cache(self) -> None:
        """Clears the prefix caches of all models. Running requests are not affected."""
        await self.call(ResetPrefixCache)

    async def call(self, message: Callable[[str], ToCore]) -> Any:
        """Sends a message, made from the id of the call, and waits for its reply."""
        self.check()
        self.client.listen(self)  # the reply comes to this event loop, also before the first request
        return await self._calls.ask(self.client, self.new_id(), message)

    async def close(self) -> None:
        self.stop_opening()
        await self.client.close()
        self.fail(EngineClosed("the engine was closed"))

    # Messages of the core

    def receive(self, messages: list[FromCore]) -> None:
        """Handles messages. An exception in one does not stop the others, since each may finish a request."""
        self.last_message_time = time.monotonic()
        outputs: list[Output] = []
        for message in messages:
            if isinstance(message, Output):
                outputs.append(message)
                continue
            try:
                self._handle(message)
            except Exception:
                log.exception("a message of the engine core could not be handled: %.200r", message)
        if outputs:
            self._handle_outputs(outputs)

    def _handle(self, message: FromCore) -> None:
        if isinstance(message, Begun):
            self._outputs.begin(message.request_ids)
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, Pulse | Loading | ModelDescriptions | Ready):
            self.note(message)
        elif isinstance(message, AbortAll):
            self.client.send(AbortedAll(message.call, self._abort_own()))
        elif isinstance(message, Reply):
            self._calls.answer(message)

    def fail(self, error: BaseException) -> None:
        """The core is lost: every stream and every waiting call raises `error`."""
        cause = error if self.failure is None else self.failure
        for mailbox in self._mailboxes.values():
            mailbox.fail(cause)
        self._calls.fail(cause)
        super().fail(error)
        wake(self._queue_waiters)

    def _handle_outputs(self, outputs: list[Output]) -> None:
        failed: list[tuple[RequestState, Exception]] = []
        updated, aborts = self._outputs.process(outputs, failed)
        for abort in aborts:
            self.client.send(abort)
        for state in updated:
            mailbox = self._mailboxes.get(state.id)
            if mailbox is not None:
                try:
                    self._notify(state, mailbox)
                except Exception as error:
                    self._fail_request(state, mailbox, error)
        for state, cause in failed:
            self._fail_request(state, self._mailboxes.get(state.id), cause)

    def _fail_request(self, state: RequestState, mailbox: Mailbox | None, error: Exception) -> None:
        """Aborts a request whose output raised an exception; its stream raises it."""
        log.error("the output of request %s could not be processed", state.id, exc_info=error)
        self._outputs.drop(state.id)
        self.client.send(Abort(state.id))
        if mailbox is not None:
            mailbox.fail(error)

    def _notify(self, state: RequestState, mailbox: Mailbox) -> None:
        """Puts a state into its mailbox where it is finished or an increment is due."""
        if state.queued:
            self._start(state)
        if state.finished:
            self._close(state)
            if state.refused is not None:
                mailbox.fail(state.refused)
            else:
                mailbox.put(state)
        elif state.streaming and state.unread >= self.stream_interval:
            mailbox.put(state)

    def _refuse(self, message: Refused) -> None:
        if (mailbox := self._mailboxes.get(message.request_id)) is not None:
            mailbox.fail(message.error())

    def new_id(self) -> str:
        """A request id that is unique among all front ends of this machine."""
        return f"{self._prefix}-{next(self._request_numbers)}"

    def _start(self, state: RequestState) -> None:
        state.queued = False
        message = state.message
        self.load.start(message.model, len(message.prompt_token_ids), message.caller)
        if self._queue_waiters:
            wake(self._queue_waiters)

    def _close(self, state: RequestState) -> None:
        if self._mailboxes.pop(state.id, None) is not None:
            if state.queued:
                self._start(state)
            self.load.finish()
            state.count_end()


def in_use(name: str) -> UserError:
    return UserError(f"request id {name!r} is in use; wait for it to end or choose another")


# CoreCalls: calls to the core that wait for a reply, by id.

Reply = AbortedAll | ResetPrefixCache | Inspected | Controlled


class CoreCalls:
    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def ask(self, client: CoreClient, call: str, message: Callable[[str], ToCore]) -> Any:
        """Sends the message made from the id of the call, and returns its reply."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call] = waiter
        try:
            client.send(message(call))
            return await waiter
        finally:
            del self._waiting[call]

    def answer(self, reply: Reply) -> None:
        """Ends the call with its reply; that of `AbortAll` is a number."""
        waiter = self._waiting.get(reply.call)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply.count if isinstance(reply, AbortedAll) else reply)

    def fail(self, error: BaseException) -> None:
        """The core is lost: every call raises `error`."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)


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
