"""AsyncEngine: generation and pooling for asyncio programs, over a core in a thread or in another process.

This module does not import torch: where the core is another process, the front end's process never loads it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from slipstream.config.options import Options, options_of
from slipstream.front import pooling_calls
from slipstream.front.inputs import InputProcessor, Message, PreparedPrompt, Prompt
from slipstream.front.pooling_calls import OneOrMoreParams, OneOrMorePrompts, Texts
from slipstream.front.pooling_inputs import PoolingInputs, PoolingPrompts
from slipstream.front.pooling_results import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from slipstream.front.prompts import PROMPT_COST, off_loop, size_of
from slipstream.front.request_state import GenerationRequestState, RequestStream
from slipstream.front.results import Increment, RequestOutput
from slipstream.front.router import RequestRouter, in_use
from slipstream.front.served import POOLING_TASKS, SCORING, FrontEndArgs
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams, Task
from slipstream.params.sampling import SamplingParams
from slipstream.params.values import check_text
from slipstream.text.tokenizer import Tokenizer
from slipstream.transport.client import CoreClient

T = TypeVar("T")


class AsyncEngine(RequestRouter):
    """Runs many requests at a time. Each is an async iterator over results.

        engine = AsyncEngine()
        async for result in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(result.outputs[0].text)

    Breaking out of the loop aborts the request.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        models: Mapping[str, Any] | list[Options] | None = None,
        client: CoreClient | None = None,
        use_tqdm_on_load: bool = False,
        **options: Any,
    ) -> None:
        """Builds a core in this process, or uses that of `client`, which then sends the descriptions of its models.

        `models`: several models of one engine, by name, each a path or a mapping of options; or the options of each.
        """
        super().__init__()
        if client is not None:
            self.client = client
            client.listen(self)
            return
        from slipstream.front.in_process import build_served  # imports torch
        from slipstream.transport.client import ThreadClient

        front_end = FrontEndArgs.take(options)
        front_end.check_async()
        given = models if isinstance(models, list) else options_of(model, models, options)
        lanes, self.models = build_served(given, progress=use_tqdm_on_load)
        front_end.apply(self.models.values())
        self.cores = lanes.cores
        self.config = next(iter(lanes.cores.values())).config
        self.client = ThreadClient(lanes)
        self._ready = True

    # Generation

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Yields results, each with everything generated so far; or, by `output_kind` of the parameters, with what is
        new, or one at the end. A slow reader gets fewer results.

        `caller`: requests of equal priority are scheduled fairly among callers.
        """
        model = self._named(model, "generate")
        inputs, name = self._inputs(model), self._name(request_id)
        make = partial(
            inputs.prepare,
            name,
            prompt,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )
        async with self._begin(name, model, size_of(prompt), make, caller) as stream:
            async for (state,) in stream:
                if (result := state.next_result()) is not None:
                    yield result

    async def chat(
        self,
        messages: list[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        model = self._named(model, "generate")
        inputs, name = self._inputs(model), self._name(request_id)
        text = inputs.render_chat(messages, **template)
        make = partial(inputs.prepare, name, text, sampling_params, lora_request=lora_request, add_special_tokens=False)
        async with self._begin(name, model, len(text), make, caller) as stream:
            async for (state,) in stream:
                if (result := state.next_result()) is not None:
                    yield result

    async def increments(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
    ) -> AsyncIterator[list[Increment]]:
        """Yields what is new in each sample since the previous increment, in time proportional to that."""
        model = self._named(model, "generate")
        inputs, name = self._inputs(model), self._name(request_id)
        make = partial(inputs.prepare, name, prompt, sampling_params, lora_request=lora_request)
        async with self._begin(name, model, size_of(prompt), make, caller) as stream:
            async for (state,) in stream:
                if new := state.increment():
                    yield new

    @asynccontextmanager
    async def _begin(
        self, name: str, model: str, size: int, make: Callable[[], PreparedPrompt], caller: str
    ) -> AsyncIterator[RequestStream[GenerationRequestState]]:
        """Tokenises the prompt and sends it. An abort meanwhile takes effect when the prompt is tokenised."""
        if name in self._preparing or name in self._mailboxes:
            raise in_use(name)
        self._preparing[name] = False
        try:
            prepared = await off_loop(size, make)
        finally:
            aborted = self._preparing.pop(name)
        with self.read([prepared], model, aborted=aborted, caller=caller) as stream:
            yield stream

    # Pooling: the calls of `LLM`, with a list of results each

    async def encode(
        self,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        pooling_task: Task | None = None,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        model = self._named(model, *([pooling_task] if pooling_task else POOLING_TASKS))
        call = pooling_calls.encode(self.pooling_inputs(model), prompts, pooling_params, pooling_task, **how)
        return await self.pool(call, model, caller, lora_request)

    async def embed(
        self,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[EmbeddingRequestOutput]:
        model = self._named(model, "embed")
        call = pooling_calls.encode(self.pooling_inputs(model), prompts, pooling_params, "embed", **how)
        return await self.pool(call, model, caller, lora_request)

    async def classify(
        self,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[ClassificationRequestOutput]:
        model = self._named(model, "classify")
        call = pooling_calls.encode(self.pooling_inputs(model), prompts, pooling_params, "classify", **how)
        return await self.pool(call, model, caller, lora_request)

    async def score(
        self,
        data_1: Texts,
        data_2: Texts,
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[ScoringRequestOutput]:
        model = self._named(model, *SCORING)
        call = pooling_calls.score(self.pooling_inputs(model), data_1, data_2, pooling_params, **how)
        return await self.pool(call, model, caller, lora_request)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[RerankResult]:
        model = self._named(model, *SCORING)
        call = pooling_calls.rerank(self.pooling_inputs(model), query, documents, pooling_params, top_n=top_n, **how)
        return await self.pool(call, model, caller, lora_request)

    async def pool(
        self,
        call: pooling_calls.PoolingCall[T],
        model: str | None = None,
        caller: str = "",
        lora_request: LoRARequest | None = None,
    ) -> T:
        """Runs a pooling call: its batches, until it returns. Cancelling aborts its requests."""
        found: pooling_calls.Results | None = None
        try:
            while True:
                batches = next(call) if found is None else call.send(found)
                prompts = PoolingPrompts(
                    self.pooling_inputs(model), batches, self.new_id, as_lists=True, lora_request=lora_request
                )
                size = sum(PROMPT_COST + size_of(prompt) for batch in batches for prompt in batch.prompts)
                submits: list[PreparedPrompt] = await off_loop(size, partial(list, prompts))
                with self.read((), model, streaming=False, caller=caller) as stream:
                    found = prompts.in_order([state.result() for state in await stream.feed(submits)])
        except StopIteration as end:
            result: T = end.value
            return result

    def pooling_inputs(self, model: str | None = None) -> PoolingInputs:
        self.check()
        return self.model(model).require_pooling()

    # Models

    @property
    def inputs(self) -> InputProcessor:
        return self._inputs(None)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model().tokenizer

    def _named(self, model: str | None, *tasks: str) -> str:
        self.check()
        return self.model(model, *tasks).description.name

    def _inputs(self, model: str | None) -> InputProcessor:
        self.check()
        return self.model(model).inputs

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            return self.new_id()
        check_text("request_id", request_id)
        return request_id
