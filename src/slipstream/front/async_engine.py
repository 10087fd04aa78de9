"""AsyncEngine: generation and pooling for asyncio programs, over a core in a thread or in another process.

This module does not import torch: where the core is another process, the front end's process never loads it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from slipstream.base.log import progress
from slipstream.config.options import Options, options_of
from slipstream.front.inputs import InputProcessor, Message, PreparedPrompt, Prompt
from slipstream.front.pooling_calls import (
    OneOrMoreParams,
    OneOrMorePrompts,
    PoolingCall,
    Results,
    Texts,
    drive,
    encode,
    rerank,
    score,
)
from slipstream.front.pooling_inputs import PoolingInputs, PoolingPrompts
from slipstream.front.pooling_prompts import PoolingBatch
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
        how: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "lora_request": lora_request}
        async with self._stream(prompt, sampling_params, request_id, model, caller, **how) as stream:
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
        self.check()
        prompt = self.model(model, "generate").inputs.render_chat_prompt(messages, **template)
        how: dict[str, Any] = {"lora_request": lora_request, "add_special_tokens": False}
        async with self._stream(prompt, sampling_params, request_id, model, caller, **how) as stream:
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
        how: dict[str, Any] = {"lora_request": lora_request}
        async with self._stream(prompt, sampling_params, request_id, model, caller, **how) as stream:
            async for (state,) in stream:
                if new := state.increment():
                    yield new

    @asynccontextmanager
    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        model: str | None,
        caller: str,
        **how: Any,
    ) -> AsyncIterator[RequestStream[GenerationRequestState]]:
        """Tokenises the prompt and sends it. An abort meanwhile takes effect when the prompt is tokenised. `how`: see
        `InputProcessor.prepare`."""
        self.check()
        served = self.model(model, "generate")
        if request_id is not None:
            check_text("request_id", request_id)
        own = self.new_id(request_id)
        name = own if request_id is None else request_id
        if name in self._preparing or name in self._named:
            raise in_use(name)
        self._preparing[name] = False
        try:
            special = how.get("add_special_tokens", True)
            prompt = await served.inputs.images.load(prompt, add_special_tokens=special, caller=caller)
            prepared = await off_loop(size_of(prompt), partial(served.inputs.prepare, own, prompt, params, **how))
        finally:
            aborted = self._preparing.pop(name)
        with self.read([prepared], served.description.name, aborted=aborted, caller=caller, name=request_id) as stream:
            yield stream

    # Pooling: a list of results each. `how`: see docs/pooling.md

    async def encode(
        self,
        /,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        pooling_task: Task | None = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """Runs any pooling task for each prompt: embed, classify, token_embed, token_classify or sparse.

        A prompt is a text, token ids, an object with `prompt` or `prompt_token_ids`, or a pair of texts. `how`:
        prompt_name or prompt (the text to put before each input), truncate_prompt_tokens, and tokenization_kwargs with
        truncate_prompt_tokens and truncation_side. `outputs.data` is a torch tensor in a process with torch; for
        sparse, `outputs` has indices and weights.
        """
        call = partial(encode, prompts=prompts, params=pooling_params, task=pooling_task, **how)
        tasks = [pooling_task] if pooling_task else POOLING_TASKS
        return await self._pool(call, model, tasks, use_tqdm, lora_request, caller)

    async def embed(
        self,
        /,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds each prompt: `outputs.embedding` is a list, `outputs.data` an array. `how`: see `encode`."""
        call = partial(encode, prompts=prompts, params=pooling_params, task="embed", **how)
        return await self._pool(call, model, ["embed"], use_tqdm, lora_request, caller)

    async def classify(
        self,
        /,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[ClassificationRequestOutput]:
        """Classifies each prompt: `outputs.probs` by class, and `outputs.label` of the most likely class."""
        call = partial(encode, prompts=prompts, params=pooling_params, task="classify", **how)
        return await self._pool(call, model, ["classify"], use_tqdm, lora_request, caller)

    async def score(
        self,
        /,
        data_1: Texts,
        data_2: Texts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts as `outputs.score`: one with one, one with each of many, or the i-th with the i-th.

        `how`: instruction (where the model takes one), prompt_name, truncate_prompt_tokens, tokenization_kwargs (see
        `encode`), and chat_template: a Jinja template for the prompt of a cross-encoder, with the texts as messages of
        the roles query and document.
        """
        call = partial(score, first=data_1, second=data_2, params=pooling_params, **how)
        return await self._pool(call, model, SCORING, use_tqdm, lora_request, caller)

    async def rerank(
        self,
        /,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        caller: str = "",
        **how: Any,
    ) -> list[RerankResult]:
        """Returns the documents by descending relevance, with index, score and text. `how`: see `score`."""
        call = partial(rerank, query=query, documents=documents, params=pooling_params, top_n=top_n, **how)
        return await self._pool(call, model, SCORING, use_tqdm, lora_request, caller)

    async def _pool(
        self,
        call: Callable[[PoolingInputs], PoolingCall[T]],
        model: str | None,
        tasks: Sequence[str],
        use_tqdm: bool,
        lora_request: LoRARequest | None,
        caller: str,
    ) -> T:
        """Runs a pooling call. Cancelling aborts its requests."""
        self.check()
        served = self.model(model, *tasks)
        inputs, is_inline = served.require_pooling(), self.inline is not None
        advance: Callable[[int], None] | None = None

        async def run(batches: list[PoolingBatch]) -> Results:
            nonlocal advance
            if advance is None:
                total = sum(batch.num_of_call for batch in batches)
                advance = stack.enter_context(progress(total, "prompts", use_tqdm))
            prompts = PoolingPrompts(inputs, batches, self.new_id, as_lists=not is_inline, lora_request=lora_request)
            source: Iterable[PreparedPrompt] = prompts
            if not is_inline:
                size = sum(PROMPT_COST + size_of(prompt) for batch in batches for prompt in batch.prompts)
                source = await off_loop(size, partial(list[PreparedPrompt], prompts))
            states = await self.run(source, served, lambda state: advance(state.num_tokens), caller=caller)
            return prompts.in_order([state.result() for state in states])

        with ExitStack() as stack:
            return await drive(call(inputs), run)

    # Models

    @property
    def inputs(self) -> InputProcessor:
        self.check()
        return self.model().inputs

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model().tokenizer
