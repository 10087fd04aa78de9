"""AsyncEngine: generation for asyncio programs, over a core in a thread beside the event loop or in another process.

Nothing here needs torch: where the core is another process, none is loaded into this one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from slipstream.config.options import options_of
from slipstream.engine.front import pooling_calls
from slipstream.engine.front.inputs import Message, Prompt
from slipstream.engine.front.outputs import OutputProcessor, Track
from slipstream.engine.front.pool_inputs import PoolInputs
from slipstream.engine.front.pool_results import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from slipstream.engine.front.queue_load import QueueLoad
from slipstream.engine.front.reading import Reading
from slipstream.engine.front.results import Increment, RequestOutput
from slipstream.engine.front.served import POOLING_TASKS, SCORING, ServedModel, choose
from slipstream.engine.front.stream import Mailbox
from slipstream.engine.link.client import CoreClient
from slipstream.engine.link.wire import FromCore, Loading, Opening, Pulse, Ready, Refused
from slipstream.errors import EngineClosed, InvalidParams, UserError
from slipstream.messages import Abort, Output, Submit
from slipstream.metrics.stats import ModelStats
from slipstream.params import SamplingParams
from slipstream.pooling_params import PoolingParams, Task

T = TypeVar("T")


class AsyncEngine:
    """Many requests at once, each a stream of results.

        engine = AsyncEngine()
        async for result in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(result.outputs[0].text)

    Leaving the loop early aborts the request.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        models: Mapping[str, Any] | None = None,
        client: CoreClient | None = None,
        **options: Any,
    ) -> None:
        """With a `client` it talks to that core, whose models it learns from it; else it builds one of its own.

        `models`: several in one engine, by name, each a model or an object of options.
        """
        self.models: dict[str, ServedModel] = {}  # by name; the first is meant where none is named
        self.load = QueueLoad()
        self.pulse = Pulse()
        self.stats: dict[str, ModelStats] = {}  # of each model's requests
        self.core_pid: int | None = None  # of a core in another process
        self.stage = "waiting for the engine core"  # of its start, in words
        self.heard = time.monotonic()  # when the core last said something
        self.failure: BaseException | None = None
        self._ready = False
        self._waiters: list[asyncio.Future[None]] = []  # for it to be ready, or lost
        self._opening: asyncio.Task[None] | None = None
        self._outputs = OutputProcessor(None)
        self._mailboxes: dict[str, Mailbox] = {}
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)
        if client is not None:
            self.client = client
            client.listen(self)
            return
        from slipstream.engine.build import build_lanes  # loads torch, which a front end without a core need not have
        from slipstream.engine.link.local import ThreadClient

        lanes, opened = build_lanes(options_of(model, models, options))
        self.config = next(iter(lanes.cores.values())).config
        self.models = {name: ServedModel.load(each.facts) for name, each in opened.items()}
        self.client = ThreadClient(lanes)
        self._ready = True

    # Generating

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        model: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Each result holds all there is so far. A slow reader gets fewer of them."""
        model = self._named(model, "generate")
        message, text = self._inputs(model).submit(
            self._name(request_id), prompt, sampling_params, priority=priority, cache_salt=cache_salt
        )
        with self.read([(message, text)], model) as reading:
            async for (track,) in reading:
                yield track.result()

    async def chat(
        self,
        messages: list[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        model = self._named(model, "generate")
        inputs = self._inputs(model)
        text = inputs.render_chat(messages, **template)
        message, _ = inputs.submit(self._name(request_id), text, sampling_params, add_special_tokens=False)
        with self.read([(message, text)], model) as reading:
            async for (track,) in reading:
                yield track.result()

    async def increments(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
    ) -> AsyncIterator[list[Increment]]:
        """What is new in each sample, as it comes; what a slow reader missed comes as one. Costs what is new."""
        model = self._named(model, "generate")
        message, text = self._inputs(model).submit(self._name(request_id), prompt, sampling_params)
        with self.read([(message, text)], model) as reading:
            async for (track,) in reading:
                if new := track.increment():
                    yield new

    # Pooling: the verbs of `LLM`, each a list of results

    async def encode(
        self, prompts: Any, pooling_params: Any = None, *, pooling_task: Task | None = None, model: str | None = None,
        **how: Any,
    ) -> list[PoolingRequestOutput[Any]]:  # fmt: skip
        model = self._named(model, *([pooling_task] if pooling_task else POOLING_TASKS))
        call = pooling_calls.encode(self.pool_inputs(model), prompts, pooling_params, pooling_task, **how)
        return await self.pool(call, model)

    async def embed(
        self, prompts: Any, pooling_params: Any = None, *, model: str | None = None, **how: Any
    ) -> list[EmbeddingRequestOutput]:
        model = self._named(model, "embed")
        call = pooling_calls.encode(self.pool_inputs(model), prompts, pooling_params, "embed", **how)
        return await self.pool(call, model)

    async def classify(
        self, prompts: Any, pooling_params: Any = None, *, model: str | None = None, **how: Any
    ) -> list[ClassificationRequestOutput]:
        model = self._named(model, "classify")
        call = pooling_calls.encode(self.pool_inputs(model), prompts, pooling_params, "classify", **how)
        return await self.pool(call, model)

    async def score(
        self, data_1: Any, data_2: Any, pooling_params: PoolingParams | None = None, *, model: str | None = None,
        **how: Any,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        model = self._named(model, *SCORING)
        call = pooling_calls.score(self.pool_inputs(model), data_1, data_2, pooling_params, **how)
        return await self.pool(call, model)

    async def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None,
        pooling_params: PoolingParams | None = None, *, model: str | None = None, **how: Any,
    ) -> list[RerankResult]:  # fmt: skip
        model = self._named(model, *SCORING)
        call = pooling_calls.rerank(self.pool_inputs(model), query, documents, pooling_params, top_n=top_n, **how)
        return await self.pool(call, model)

    async def pool(self, call: pooling_calls.Call[T], model: str | None = None) -> T:
        """Run a verb of pooling: what it asks for, until it has what it wants. Whoever leaves early aborts it."""
        found: pooling_calls.Results | None = None
        try:
            while True:
                batches = next(call) if found is None else call.send(found)
                feed = pooling_calls.Feed(self.pool_inputs(model), batches, self.new_id, plain=True)
                # many texts take a while to encode, and others are waiting for the loop
                submits = list(feed) if feed.total <= 8 else await asyncio.to_thread(list, feed)
                with self.read(submits, model, stream=False) as reading:
                    found = feed.results(await reading.wait())  # type: ignore[arg-type]
        except StopIteration as end:
            result: T = end.value
            return result

    def pool_inputs(self, model: str | None = None) -> PoolInputs:
        self.check()
        served = self.model(model)
        if served.pool_inputs is None:
            raise InvalidParams(f"{served.facts.name} only generates; choose a model that makes vectors or scores")
        return served.pool_inputs

    def read(
        self, submits: Sequence[tuple[Submit, str | None]], model: str | None = None, *, stream: bool = True
    ) -> Reading:
        """Send prompts that `inputs` has made, for one reader. Without `stream` it hears only of their ends."""
        self.check()
        served = self.model(model)
        self.client.listen(self)
        mailbox = Mailbox()
        reading = Reading(self, [], mailbox)
        stats = self.stats.setdefault(served.facts.name, ModelStats())
        for message, text in submits:
            name = message.request_id
            if name in self._mailboxes:
                self.leave(reading, failed=True)
                raise UserError(f"request id {name!r} is in use; wait for it to end or choose another")
            if len(self.models) > 1:
                message = msgspec.structs.replace(message, model=served.facts.name)
            # open before the message leaves: the answer may be there before we look
            self._mailboxes[name] = mailbox
            track = self._outputs.open(message, text, stream=stream, tokenizer=served.tokenizer)
            track.stats = stats
            reading.tracks.append(track)
            num_tokens = len(message.prompt_token_ids)
            stats.prompt_tokens += num_tokens
            stats.prompt_length.observe(num_tokens)
            self.load.enter(num_tokens)
            self.client.send(message)
        return reading

    def leave(self, reading: Reading, *, failed: bool) -> None:
        """The reader has gone; what has not ended is aborted. If it `failed`, its queries are not kept for others."""
        for track in reading.tracks:
            if not track.finished or (failed and track.is_query):
                self.client.send(Abort(track.id))
            self._outputs.drop(track.id)
            self._close(track)

    # Ending

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, finished as aborted."""
        track = self._outputs.tracks.get(request_id)
        self.client.send(Abort(request_id))
        if track is not None:
            self._outputs.drop(request_id)
            track.abort()
            mailbox = self._mailboxes[request_id]
            self._close(track)
            mailbox.put(track)

    async def abort_all(self) -> int:
        """Every request of this front end; how many there were."""
        names = list(self._outputs.tracks)
        for name in names:
            await self.abort(name)
        return len(names)

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        await self.client.close()
        self.fail(EngineClosed("the engine was closed"))

    # What the core says

    def hear(self, messages: list[FromCore]) -> None:
        self.heard = time.monotonic()
        outputs: list[Output] = []
        for message in messages:
            if isinstance(message, Output):
                outputs.append(message)
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
        if outputs:
            self._take(outputs)

    def fail(self, error: BaseException) -> None:
        """The core is gone: everyone who waits hears why."""
        if self.failure is None:
            self.failure = error
        for mailbox in self._mailboxes.values():
            mailbox.fail(self.failure)
        self._wake_waiters()

    def _take(self, outputs: list[Output]) -> None:
        moved, aborts = self._outputs.process(outputs)
        for abort in aborts:
            self.client.send(abort)
        for track in moved:
            if (mailbox := self._mailboxes.get(track.id)) is None:
                continue
            if track.queued:
                self._start(track)
            if track.finished:
                self._close(track)
                mailbox.put(track)
            elif track.stream:
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

    @property
    def inputs(self) -> Any:
        return self._inputs(None)

    @property
    def tokenizer(self) -> Any:
        return self.model().tokenizer

    def new_id(self) -> str:
        """An id that no other request has, of this front end or of another on this machine."""
        return f"{self._prefix}-{next(self._numbers)}"

    def _named(self, model: str | None, *tasks: str) -> str:
        self.check()
        return self.model(model, *tasks).facts.name

    def _inputs(self, model: str | None) -> Any:
        self.check()
        return self.model(model).inputs

    def _name(self, request_id: str | None) -> str:
        return self.new_id() if request_id is None else request_id

    def _start(self, track: Track) -> None:
        track.queued = False
        self.load.start(len(track.message.prompt_token_ids))

    def _close(self, track: Track) -> None:
        if self._mailboxes.pop(track.id, None) is not None:
            if track.queued:
                self._start(track)
            self.load.leave()
            track.count_end()

    def _look_ready(self) -> None:
        if self.is_ready:
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
