"""Desk: where prompts are handed in to a core, and what it says of them is handed out to those who wait.

It knows who waits for what, how much is under way, and whether the core is there; not what a prompt asks for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Sequence

import msgspec

from slipstream.errors import EngineClosed, RequestTooLarge, UserError
from slipstream.frontend.answer_size import check_result
from slipstream.frontend.mailbox import Mailbox
from slipstream.frontend.queue_load import QueueLoad
from slipstream.frontend.request_state import OutputProcessor, RequestState
from slipstream.frontend.request_stream import RequestStream
from slipstream.frontend.served import ServedModel, choose
from slipstream.messages import Abort, Output, Submit, SubmitAll
from slipstream.metrics.stats import ModelStats
from slipstream.params import check_text
from slipstream.transport.client import CoreClient
from slipstream.transport.frames import AbortAll, AbortedAll, Begun, FromCore, Loading, Opening, Pulse, Ready, Refused

log = logging.getLogger("slipstream.front")


class RequestRouter:
    """Listens to the core at the other end of its client, once it has one."""

    client: CoreClient

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}  # by name; the first is meant where none is named
        self.load = QueueLoad()
        self.pulse = Pulse()
        self.stats: dict[str, ModelStats] = {}  # of each model's requests
        self.core_pid: int | None = None  # of a core in another process
        self.stage = "waiting for the engine core"  # of its start, in words
        self.heard = time.monotonic()  # when the core last said something
        self.failure: BaseException | None = None
        self.stream_interval = 1  # tokens of which a stream's reader hears at once, after the first
        self._ready = False
        self._waiters: list[asyncio.Future[None]] = []  # for it to be ready, or lost
        self._for_room: list[asyncio.Future[None]] = []  # for others to leave the queue
        self._opening: asyncio.Task[None] | None = None
        self._outputs = OutputProcessor(None)
        self._mailboxes: dict[str, Mailbox] = {}
        self._preparing: dict[str, bool] = {}  # by name, prompts that are not sent yet: whether they are aborted
        self._abort_calls: dict[str, asyncio.Future[int]] = {}  # asked of the other front ends, by call
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)

    # Handing in

    def read(
        self,
        submits: Sequence[tuple[Submit, str | None]],
        model: str | None = None,
        *,
        stream: bool = True,
        aborted: bool = False,
        caller: str = "",
    ) -> RequestStream:
        """Send prompts that `inputs` has made, for one reader: all begin, or none does. Without `stream` it hears only
        of their ends. Those that are `aborted` already are not sent. `caller`: requests are seated by fair turns of
        their callers."""
        self.check()
        check_text("caller", caller)
        self.client.listen(self)
        served = self.model(model)
        count, most = sum(message.num_samples for message, _ in submits), served.facts.max_waiting
        if most is not None and count > most:
            raise RequestTooLarge(
                f"of {len(submits)} prompts {count} would wait, and no more than {most} may; send fewer at once, "
                "lower n, or raise max_waiting"
            )
        reading = RequestStream(self, served, Mailbox(), stream=stream, caller=caller)
        messages = [self._enter(reading, message, text) for message, text in submits]
        if aborted:
            for track in reading.tracks:
                self._abort(track)
        elif messages:
            self._send(reading, len(messages), messages[0] if len(messages) == 1 else SubmitAll(messages))
        return reading

    def send(self, reading: RequestStream, message: Submit, text: str | None) -> None:
        """One more prompt for a reader; if it cannot be, the reader has nothing under way afterwards."""
        self._send(reading, 1, self._enter(reading, message, text))

    def _send(self, reading: RequestStream, count: int, message: Submit | SubmitAll) -> None:
        """Send the reader's last `count` prompts, or forget them where they cannot be sent."""
        try:
            self.client.send(message)
        except UserError:
            for track in reading.tracks[-count:]:
                self._outputs.drop(track.id)
                self._close(track)
            del reading.tracks[-count:]
            raise

    def _enter(self, reading: RequestStream, message: Submit, text: str | None) -> Submit:
        """Who waits for it is known before it is sent: the answer may be there before we look."""
        name, served = message.request_id, reading.served
        if name in self._mailboxes:
            self.leave(reading, failed=True)
            raise in_use(name)
        if (limit := self.client.max_result) is not None:
            try:
                check_result(served.facts, message, limit)
            except UserError:
                self.leave(reading, failed=True)
                raise
        if len(self.models) > 1 or reading.caller:
            model = served.facts.name if len(self.models) > 1 else ""
            message = msgspec.structs.replace(message, model=model, caller=reading.caller)
        self._mailboxes[name] = reading.mailbox
        track = self._outputs.open(message, text, stream=reading.stream, tokenizer=served.tokenizer)
        if (stats := self.stats.get(served.facts.name)) is None:
            stats = self.stats[served.facts.name] = ModelStats()
        track.stats = stats
        reading.tracks.append(track)
        num_tokens = len(message.prompt_token_ids)
        stats.prompt_tokens += num_tokens
        stats.prompt_length.observe(num_tokens)
        self.load.enter(message.model, num_tokens, message.caller)
        return message

    def leave(self, reading: RequestStream, *, failed: bool) -> None:
        """The reader has gone; what has not ended is aborted. If it `failed`, its queries are not kept for others."""
        for track in reading.tracks:
            if not track.finished or (failed and track.is_query):
                self.client.send(Abort(track.id))
            self._outputs.drop(track.id)
            self._close(track)

    def num_queued(self, served: ServedModel) -> int:
        """Prompts of this front end that wait for the model."""
        return self.load.queued_of[served.facts.name if len(self.models) > 1 else ""]

    async def until_one_starts(self) -> None:
        """Returns when a prompt has left the queue; raises if none ever will."""
        self.check()
        self._for_room.append(waiter := asyncio.get_running_loop().create_future())
        await waiter
        self.check()

    # Ending

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, finished as aborted."""
        self._abort_named(request_id)

    def _abort_named(self, request_id: str) -> None:
        if request_id in self._preparing:
            self._preparing[request_id] = True
            return
        track = self._outputs.tracks.get(request_id)
        self.client.send(Abort(request_id))
        if track is not None:
            self._abort(track)

    def _abort(self, track: RequestState) -> None:
        self._outputs.drop(track.id)
        track.abort()
        mailbox = self._mailboxes[track.id]
        self._close(track)
        mailbox.put(track)

    async def abort_all(self) -> int:
        """Every request of this front end; how many there were."""
        return self._abort_own()

    def _abort_own(self) -> int:
        names = [*self._outputs.tracks, *(name for name, aborted in self._preparing.items() if not aborted)]
        for name in names:
            self._abort_named(name)
        return len(names)

    async def abort_others(self) -> int:
        """Every request of the other front ends of this core; how many there were, once all have answered."""
        self.check()
        call = self.new_id()
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._abort_calls[call] = waiter
        try:
            self.client.send(AbortAll(call))
            return await waiter
        finally:
            del self._abort_calls[call]

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        await self.client.close()
        self.fail(EngineClosed("the engine was closed"))

    # What the core says

    def hear(self, messages: list[FromCore]) -> None:
        """Whatever one message does, the others are heard: each may be the end that somebody waits for."""
        self.heard = time.monotonic()
        outputs: list[Output] = []
        for message in messages:
            if isinstance(message, Output):
                outputs.append(message)
                continue
            try:
                self._note(message)
            except Exception:
                log.exception("what the engine core said could not be taken in: %.200r", message)
        if outputs:
            self._take(outputs)

    def _note(self, message: FromCore) -> None:
        if isinstance(message, Begun):
            self._outputs.begin(message.request_ids)
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, Pulse):
            self.pulse = message
        elif isinstance(message, Loading):
            self.stage = message.stage
        elif isinstance(message, Opening):
            self.core_pid = message.pid
            self._opening = asyncio.ensure_future(self._open(message))
        elif isinstance(message, Ready):
            self._ready = True
            self._look_ready()
        elif isinstance(message, AbortAll):
            self.client.send(AbortedAll(message.call, self._abort_own()))
        elif isinstance(message, AbortedAll):
            waiter = self._abort_calls.get(message.call)
            if waiter is not None and not waiter.done():
                waiter.set_result(message.count)

    def fail(self, error: BaseException) -> None:
        """The core is gone: everyone who waits hears why."""
        if self.failure is None:
            self.failure = error
        for mailbox in self._mailboxes.values():
            mailbox.fail(self.failure)
        for waiter in self._abort_calls.values():
            if not waiter.done():
                waiter.set_exception(self.failure)
        _wake(self._waiters)
        _wake(self._for_room)

    def _take(self, outputs: list[Output]) -> None:
        failed: list[tuple[RequestState, Exception]] = []
        moved, aborts = self._outputs.process(outputs, failed)
        for abort in aborts:
            self.client.send(abort)
        for track in moved:
            mailbox = self._mailboxes.get(track.id)
            if mailbox is not None:
                try:
                    self._move(track, mailbox)
                except Exception as error:
                    self._fail_one(track, mailbox, error)
        for track, cause in failed:
            self._fail_one(track, self._mailboxes.get(track.id), cause)

    def _fail_one(self, track: RequestState, mailbox: Mailbox | None, error: Exception) -> None:
        """Its answer cannot be made; the core need not go on with it, and the reader hears why."""
        log.error("the answer to request %s cannot be made", track.id, exc_info=error)
        self._outputs.drop(track.id)
        self.client.send(Abort(track.id))
        if mailbox is not None:
            mailbox.fail(error)

    def _move(self, track: RequestState, mailbox: Mailbox) -> None:
        """Tell the reader, if there is something for it."""
        if track.queued:
            self._start(track)
        if track.finished:
            self._close(track)
            mailbox.put(track)
        elif track.stream and track.unread >= self.stream_interval:
            mailbox.put(track)

    def _refuse(self, message: Refused) -> None:
        if (mailbox := self._mailboxes.get(message.request_id)) is not None:
            mailbox.fail(message.error())

    async def _open(self, opening: Opening) -> None:
        """Tokenizers are read beside the loop, while the core loads weights."""
        loop = asyncio.get_running_loop()
        try:
            for facts in opening.models:
                self.models[facts.name] = await loop.run_in_executor(None, ServedModel.load, facts)
        except Exception as error:
            self.fail(error)
        self._opening = None
        self._look_ready()

    # States

    @property
    def is_ready(self) -> bool:
        return self._ready and self._opening is None and self.failure is None

    async def until_ready(self) -> None:
        """Returns when requests are taken; raises if that will never be."""
        while not self.is_ready:
            self.check()
            self._waiters.append(waiter := asyncio.get_running_loop().create_future())
            await waiter
        self.check()

    async def until_lost(self) -> BaseException:
        """Returns why the core is gone, once it is."""
        while self.failure is None:
            self._waiters.append(waiter := asyncio.get_running_loop().create_future())
            await waiter
        return self.failure

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def model(self, name: str | None = None, *tasks: str) -> ServedModel:
        """The one of that name, or the best for the first of these tasks that any can do."""
        return choose(self.models, name, *tasks)

    def new_id(self) -> str:
        """An id that no other request has, of this front end or of another on this machine."""
        return f"{self._prefix}-{next(self._numbers)}"

    def _start(self, track: RequestState) -> None:
        track.queued = False
        message = track.message
        self.load.start(message.model, len(message.prompt_token_ids), message.caller)
        if self._for_room:
            _wake(self._for_room)

    def _close(self, track: RequestState) -> None:
        if self._mailboxes.pop(track.id, None) is not None:
            if track.queued:
                self._start(track)
            self.load.leave()
            track.count_end()

    def _look_ready(self) -> None:
        if self.is_ready:
            _wake(self._waiters)


def in_use(name: str) -> UserError:
    return UserError(f"request id {name!r} is in use; wait for it to end or choose another")


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
