"""AsyncEngine: generation for asyncio programs, over a core in a thread beside the event loop or in another process.

Nothing here needs torch: where the core is another process, none is loaded into this one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from slipstream.config.options import options_of
from slipstream.frontend import pooling_calls
from slipstream.frontend.inputs import InputProcessor, Message, Prepared, Prompt
from slipstream.frontend.offload import EACH, off_loop, size_of
from slipstream.frontend.pool_inputs import PoolInputs
from slipstream.frontend.pool_results import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from slipstream.frontend.pooling_calls import PoolParams, PoolPrompts, Texts
from slipstream.frontend.request_stream import RequestStream
from slipstream.frontend.results import Increment, RequestOutput
from slipstream.frontend.router import RequestRouter, in_use
from slipstream.frontend.served import POOLING_TASKS, SCORING
from slipstream.params import SamplingParams, check_text
from slipstream.pooling_params import PoolingParams, Task
from slipstream.text.tokenizer import Tokenizer
from slipstream.transport.client import CoreClient

T = TypeVar("T")


class AsyncEngine(RequestRouter):
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
        super().__init__()
        if client is not None:
            self.client = client
            client.listen(self)
            return
        from slipstream.frontend.in_process import (
            build_served,  # loads torch, which a front end without a core need not have
        )
        from slipstream.transport.thread_client import ThreadClient

        lanes, self.models = build_served(options_of(model, models, options))
        self.config = next(iter(lanes.cores.values())).config
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
        caller: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Each result holds all there is so far. A slow reader gets fewer of them.

        `caller` names whose request it is: those of one priority are seated by fair turns of their callers.
        """
        model = self._named(model, "generate")
        inputs, name = self._inputs(model), self._name(request_id)
        make = partial(inputs.submit, name, prompt, sampling_params, priority=priority, cache_salt=cache_salt)
        async with self._begin(name, model, size_of(prompt), make, caller) as reading:
            async for (track,) in reading:
                yield track.result()

    async def chat(
        self,
        messages: list[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
        caller: str = "",
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        model = self._named(model, "generate")
        inputs, name = self._inputs(model), self._name(request_id)
        text = inputs.render_chat(messages, **template)
        make = partial(inputs.submit, name, text, sampling_params, add_special_tokens=False)
        async with self._begin(name, model, len(text), make, caller) as reading:
            async for (track,) in reading:
                yield track.result()

    async def increments(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
        caller: str = "",
    ) -> AsyncIterator[list[Increment]]:
        """What is new in each sample, as it comes; what a slow reader missed comes as one. Costs what is new."""
        model = self._named(model, "generate")
        inputs, name = self._inputs(model), self._name(request_id)
        make = partial(inputs.submit, name, prompt, sampling_params)
        async with self._begin(name, model, size_of(prompt), make, caller) as reading:
            async for (track,) in reading:
                if new := track.increment():
                    yield new

    @asynccontextmanager
    async def _begin(
        self, name: str, model: str, size: int, make: Callable[[], Prepared], caller: str
    ) -> AsyncIterator[RequestStream]:
        """A request, once its prompt is encoded. An abort that comes before that waits for it."""
        if name in self._preparing or name in self._mailboxes:
            raise in_use(name)
        self._preparing[name] = False
        try:
            prepared = await off_loop(size, make)
        finally:
            aborted = self._preparing.pop(name)
        with self.read([prepared], model, aborted=aborted, caller=caller) as reading:
            yield reading

    # Pooling: the verbs of `LLM`, each a list of results

    async def encode(
        self, prompts: PoolPrompts, pooling_params: PoolParams = None, *, pooling_task: Task | None = None,
        model: str | None = None, caller: str = "", **how: Any,
    ) -> list[PoolingRequestOutput[Any]]:  # fmt: skip
        model = self._named(model, *([pooling_task] if pooling_task else POOLING_TASKS))
        call = pooling_calls.encode(self.pool_inputs(model), prompts, pooling_params, pooling_task, **how)
        return await self.pool(call, model, caller)

    async def embed(
        self, prompts: PoolPrompts, pooling_params: PoolParams = None, *, model: str | None = None, caller: str = "",
        **how: Any,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        model = self._named(model, "embed")
        call = pooling_calls.encode(self.pool_inputs(model), prompts, pooling_params, "embed", **how)
        return await self.pool(call, model, caller)

    async def classify(
        self, prompts: PoolPrompts, pooling_params: PoolParams = None, *, model: str | None = None, caller: str = "",
        **how: Any,
    ) -> list[ClassificationRequestOutput]:  # fmt: skip
        model = self._named(model, "classify")
        call = pooling_calls.encode(self.pool_inputs(model), prompts, pooling_params, "classify", **how)
        return await self.pool(call, model, caller)

    async def score(
        self, data_1: Texts, data_2: Texts, pooling_params: PoolingParams | None = None, *, model: str | None = None,
        caller: str = "", **how: Any,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        model = self._named(model, *SCORING)
        call = pooling_calls.score(self.pool_inputs(model), data_1, data_2, pooling_params, **how)
        return await self.pool(call, model, caller)

    async def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None,
        pooling_params: PoolingParams | None = None, *, model: str | None = None, caller: str = "", **how: Any,
    ) -> list[RerankResult]:  # fmt: skip
        model = self._named(model, *SCORING)
        call = pooling_calls.rerank(self.pool_inputs(model), query, documents, pooling_params, top_n=top_n, **how)
        return await self.pool(call, model, caller)

    async def pool(self, call: pooling_calls.Call[T], model: str | None = None, caller: str = "") -> T:
        """Run a verb of pooling: what it asks for, until it has what it wants. Whoever leaves early aborts it."""
        found: pooling_calls.Results | None = None
        try:
            while True:
                batches = next(call) if found is None else call.send(found)
                feed = pooling_calls.Feed(self.pool_inputs(model), batches, self.new_id, plain=True)
                size = sum(EACH + size_of(prompt) for batch in batches for prompt in batch.prompts)
                submits: list[Prepared] = await off_loop(size, partial(list, feed))
                with self.read((), model, stream=False, caller=caller) as reading:
                    found = feed.results(await reading.feed(submits))  # type: ignore[arg-type]
        except StopIteration as end:
            result: T = end.value
            return result

    def pool_inputs(self, model: str | None = None) -> PoolInputs:
        self.check()
        return self.model(model).require_pooling()

    # The models

    @property
    def inputs(self) -> InputProcessor:
        return self._inputs(None)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model().tokenizer

    def _named(self, model: str | None, *tasks: str) -> str:
        self.check()
        return self.model(model, *tasks).facts.name

    def _inputs(self, model: str | None) -> InputProcessor:
        self.check()
        return self.model(model).inputs

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            return self.new_id()
        check_text("request_id", request_id)
        return request_id
