"""LLM: generation and pooling for scripts. The engine runs in the caller's thread, and nothing runs between calls."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, Self, TypeVar

from slipstream.api.engine_methods import EngineMethods, StepEngine
from slipstream.api.vllm import NOT_SUPPORTED, check_unused
from slipstream.base.errors import InvalidOption, InvalidParams, InvalidPrompt, SlipstreamError
from slipstream.base.log import progress
from slipstream.base.processes import frozen_gc
from slipstream.config.config import EngineConfig
from slipstream.config.options import options_of
from slipstream.device.device import Device
from slipstream.engine.core import EngineCore
from slipstream.front.async_engine import AsyncEngine
from slipstream.front.beam_search import (
    BeamGrammars,
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    Entries,
    search_to_the_end,
)
from slipstream.front.decisions import Answer, Decisions, Question, read_questions
from slipstream.front.in_process import build_served, configs
from slipstream.front.inputs import InputProcessor, Message, PreparedPrompt, Prompt
from slipstream.front.loop_thread import LoopThread
from slipstream.front.pooling_results import PoolingRequestOutput, as_plain
from slipstream.front.prompts import GenerationPrompts, as_batch, per_prompt
from slipstream.front.request_state import GenerationRequestState, RequestStream
from slipstream.front.results import RequestOutput
from slipstream.front.served import FrontEndArgs, ServedModel
from slipstream.metrics.stats import ModelStats
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.record.record_file import write_private
from slipstream.record.step_log import StepLog, chrome_trace, stop
from slipstream.text.tokenizer import Tokenizer
from slipstream.transport.inline import InlineClient
from slipstream.transport.replicas import ReplicaClient, has_replicas, open_replicas

if TYPE_CHECKING:
    from slipstream.api.vllm import EngineArgs


Params = SamplingParams | Sequence[SamplingParams] | None
OnResult = Callable[[int, RequestOutput], None]
OneOrMoreAdapters = LoRARequest | Sequence[LoRARequest | None] | None


P = ParamSpec("P")
T = TypeVar("T")


def waits_for(
    method: Callable[Concatenate[AsyncEngine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[LLM, P], T]:
    """The method of `LLM` that runs this one of its engine, and waits for the result. It shows its progress, unless
    `use_tqdm` is False."""

    @wraps(method)
    def call(llm: LLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        kwargs.setdefault("use_tqdm", True)
        with frozen_gc():  # results are objects too
            return llm._driver.call(method(llm._engine, *args, **kwargs))

    return call


def with_tensors(
    method: Callable[P, Coroutine[Any, Any, list[PoolingRequestOutput[Any]]]],
) -> Callable[P, Coroutine[Any, Any, list[PoolingRequestOutput[Any]]]]:
    """The same call, with a `PoolingOutput` also for vectors and classes."""

    @wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> list[PoolingRequestOutput[Any]]:
        return [as_plain(one) for one in await method(*args, **kwargs)]

    return call


class LLM(EngineMethods):
    """An engine with one or more models, to call from Python.

        with LLM() as llm:
            print(llm.generate("Once upon a time")[0].outputs[0].text)

        with LLM(task="embed") as llm:
            vector = llm.embed("Once upon a time")[0].outputs.embedding

    Without a model it runs the embedded SmolLM2, or MiniLM for embeddings. `config/options.py` has the options; the
    arguments of vLLM's LLM are accepted too (`config/vllm_args.py`, docs/vllm.md).
    Several models share one engine: `models={"chat": MODEL, "embed": {"task": "embed"}}`. Each call uses the best model
    for its task, or the one named by `model`. Threads may share an LLM: their calls run one after another, streams
    alternate result by result, and `close` waits for the current call.
    """

    _step_engine: StepEngine | None = None

    def __init__(
        self,
        model: str | None = None,
        *,
        models: Mapping[str, Any] | None = None,
        use_tqdm_on_load: bool = True,
        _device: Device | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("max_itl", 0.0)  # offline calls have no inter-token latency to keep
        front_end = FrontEndArgs.take(options)
        given = options_of(model, models, options)
        self._beam_grammars = BeamGrammars()
        driver: InlineClient | LoopThread
        if has_replicas(given):
            source = open_replicas(given)
            driver = LoopThread(lambda: ReplicaClient(source, source.count))
            super().__init__(driver.engine, driver, {}, configs(given), front_end)
        else:
            lanes, served = build_served(given, progress=use_tqdm_on_load, device=_device)
            driver = InlineClient(lanes, sends_begun=front_end.disable_log_stats is False)
            own = {name: core.config for name, core in lanes.cores.items()}
            super().__init__(AsyncEngine(client=driver), driver, lanes.cores, own, front_end)
            self._engine.models |= served
            self._engine.stats |= {name: ModelStats() for name in lanes.cores}
            self._engine.counts = front_end.disable_log_stats is False
        self._engine.id_prefix = ""  # as in vLLM
        self.models = self._engine.models
        front_end.apply(self.models.values())
        # also without a call of `close`
        self._free = weakref.finalize(self, _close_in, os.getpid(), driver.shut_down)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**engine_args.given())

    @property
    def core(self) -> EngineCore:
        """The core of the first model."""
        self._driver.check_open()
        if not self.cores:
            raise InvalidOption(
                "the cores of replicas are in other processes; set data_parallel_size to 1, without ray"
            )
        return next(iter(self.cores.values()))

    @property
    def config(self) -> EngineConfig:
        """The configuration of the first model."""
        return next(iter(self._configs.values()))

    @property
    def inputs(self) -> InputProcessor:
        """The input processing of the model that generates."""
        return self._model(None, "generate").inputs

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the first model."""
        return next(iter(self.models.values())).tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
        lora_request: OneOrMoreAdapters = None,
        model: str | None = None,
        on_result: OnResult | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Generates for all prompts, batched. Results are in the order of the prompts.

        `on_result` is called with each result as soon as it is there, and with the number of its prompt.
        `priority` and `cache_salt`, one for all or one per prompt, override those of the parameters. `lora_request`:
        the LoRA adapter, one for all or one per prompt. `unused`: arguments of vLLM, such as mm_processor_kwargs, that
        are refused unless they are None.
        """
        check_unused(unused, "tokenization_kwargs", "mm_processor_kwargs")
        served = self._model(model, "generate")
        batch = served.inputs.images.load_all(as_batch(prompts), add_special_tokens=True)
        return self._run(
            served, batch, sampling_params, use_tqdm, priority, cache_salt, lora_request, on_result,
            add_special_tokens=True,
        )  # fmt: skip

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        allow_control_tokens: bool | None = None,
        lora_request: OneOrMoreAdapters = None,
        model: str | None = None,
        on_result: OnResult | None = None,
        **unused: Any,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation, or of each of several.

        `chat_template`: instead of the model's. `chat_template_content_format` is vLLM's; any of its values is fine,
        because a template gets the content in the form that it reads.
        A control token in the text of a message, such as <|im_end|>, is encoded as plain text, unless
        `allow_control_tokens` is set.
        """
        check_unused(unused, "tokenization_kwargs", "mm_processor_kwargs")
        if chat_template_content_format not in ("auto", "string", "openai"):
            fact = f"chat_template_content_format is {chat_template_content_format!r:.50}"
            raise InvalidParams(f"{fact}; give auto, string or openai", param="chat_template_content_format")
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        served = self._model(model, "generate")
        texts = [
            served.inputs.render_chat_prompt(
                conversation,
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                allow_control_tokens=allow_control_tokens,
            )
            for conversation in conversations
        ]
        # the chat template adds special tokens itself
        batch = served.inputs.images.load_all(texts, add_special_tokens=False)
        return self._run(
            served, batch, sampling_params, use_tqdm, None, None, lora_request, on_result, add_special_tokens=False
        )

    def decide(
        self,
        input: str | Sequence[Message],
        questions: Sequence[Question | Mapping[str, Any]],
        use_tqdm: bool = False,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
    ) -> list[Answer]:
        """Answers questions about one input, a text or messages, without generating text: each answer has the
        probabilities of its options.

        A question is a dictionary as of /v1/decisions, or a `PredicateQuestion`, `ChoiceQuestion` or `ScoreQuestion` of
        `slipstream.front.decisions`. With prefix caching the input is computed once.
        """
        served = self._model(model, "generate")
        decisions = Decisions(served.inputs, input, read_questions(questions))
        results = self._run(
            served, decisions.prompts, decisions.params(), use_tqdm, priority, cache_salt, lora_request, None,
            add_special_tokens=False,
        )  # fmt: skip
        drawn = [result.outputs[0] for result in results]
        for number, each in enumerate(drawn, 1):
            if each.finish_reason == "error":
                raise SlipstreamError(f"question {number} of {len(drawn)}: {each.stop_reason}")
        return decisions.answers([each.logprobs[0] for each in drawn if each.logprobs is not None])

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequest | None = None,
        concurrency_limit: int | None = None,
        model: str | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches for the likeliest continuations of each prompt. `concurrency_limit`: prompts searched at once."""
        served = self._model(model, "generate")
        step = params.of_step(served.description)
        prepared = [served.inputs.prepare(self._engine.new_id(), prompt, step)[0] for prompt in as_batch(prompts)]
        if any(each.prompt_embeds is not None for each in prepared):
            raise InvalidPrompt("beam_search extends token ids, and a prompt is prompt_embeds; use generate")
        searches = [BeamSearch(each.prompt_token_ids, params, served.description) for each in prepared]
        grammar = self._beam_grammars.compile(served, params)
        at_once = len(searches) if concurrency_limit is None else max(concurrency_limit, 1)
        parts = [searches[start : start + at_once] for start in range(0, len(searches), at_once)]

        async def generate(beams: Sequence[list[int]], each: Sequence[SamplingParams]) -> list[Entries]:
            source = GenerationPrompts(
                served.inputs, beams, each, self._engine.new_id, adapters=[lora_request] * len(beams)
            )
            states = await self._engine.run(source, served)
            return [state.samples[0].logprobs[0] for state in states]

        async def search() -> None:
            for part in parts:
                await search_to_the_end(part, step, grammar, generate, advance=advance)

        with progress(params.max_tokens * len(parts), "steps", use_tqdm) as advance:
            self._driver.call(search())
        results = [BeamSearchOutput(search.result()) for search in searches]
        if (tokenizer := served.tokenizer) is not None:
            for sequence in (each for result in results for each in result.sequences):
                sequence.text = tokenizer.decode(sequence.tokens)
        return results

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields the results of one prompt as they grow. Breaking out of the loop aborts the request."""
        served = self._model(model, "generate")
        (loaded,) = served.inputs.images.load_all([prompt], add_special_tokens=True)
        return self._stream(served, loaded, sampling_params, lora_request, add_special_tokens=True)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        **template: Any,
    ) -> Iterator[RequestOutput]:
        served = self._model(model, "generate")
        prompt = served.inputs.render_chat_prompt(messages, **template)
        (loaded,) = served.inputs.images.load_all([prompt], add_special_tokens=False)
        return self._stream(served, loaded, sampling_params, lora_request, add_special_tokens=False)

    encode = waits_for(with_tensors(AsyncEngine.encode))
    embed = waits_for(AsyncEngine.embed)
    classify = waits_for(AsyncEngine.classify)
    score = waits_for(AsyncEngine.score)
    rerank = waits_for(AsyncEngine.rerank)

    def save_record(self, path: str | Path, *, model: str | None = None, redact: bool = False) -> None:
        """Writes the last steps to a file, for `slipstream replay`. `redact`: without token ids and texts."""
        with self._inline().turn():
            core = self.core if model is None else self.cores[self._engine.model(model).base_name]
            if core.recorder is None:
                raise InvalidOption("record_steps is 0, so nothing is recorded; give a number of steps")
            write_private(Path(path), core.recorder.take().encode(redact=redact))

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Writes times of all steps within the `with` block to a file, which ui.perfetto.dev opens."""
        client = self._inline()
        with client.turn():
            log = StepLog(self.cores)
        try:
            yield
        finally:
            with client.turn():
                stop(self.cores)
            Path(path).write_bytes(chrome_trace(log.models, list(log.steps)))

    def close(self) -> None:
        """Frees the model, the cache and the device's thread. Waits for the call of another thread. In a fork of the
        process that made the LLM it does nothing."""
        driver = self._driver
        if driver.pid != os.getpid():
            return
        driver.check_no_step()
        with driver.lock:
            if not driver.closed:
                self._free()
                self._beam_grammars.close()
                for served in self.models.values():
                    served.inputs.images.close()
                self.cores.clear()

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation_config.json."""
        return self.inputs.default_params()

    def get_world_size(self) -> int:
        return 1

    @property
    def llm_engine(self) -> StepEngine:
        """The same engine, one step at a time."""
        if self._step_engine is None:
            self._inline()
            self._step_engine = StepEngine(self)
        return self._step_engine

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Only for names that the class does not have."""
            if (reason := NOT_SUPPORTED.get(name)) is not None:
                raise AttributeError(f"LLM.{name} is not supported: {reason}")
            raise AttributeError(f"LLM has no attribute {name!r}")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @frozen_gc()  # results are objects too
    def _run(
        self,
        served: ServedModel,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
        cache_salt: str | Sequence[str] | None,
        lora_request: OneOrMoreAdapters,
        on_result: OnResult | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        self._driver.check_open()
        engine = self._engine
        # every prompt is checked before the first one runs; texts may be tokenised while the device computes
        source = GenerationPrompts(
            served.inputs,
            prompts,
            per_prompt("sampling_params", sampling_params, len(prompts)),
            engine.new_id,
            priorities=per_prompt("priority", priority, len(prompts)),
            salts=per_prompt("cache_salt", cache_salt, len(prompts)),
            adapters=per_prompt("lora_request", served.lora if lora_request is None else lora_request, len(prompts)),
            add_special_tokens=add_special_tokens,
        )
        if not source.is_sure or engine.inline is None:
            source.finish()
        with progress(len(prompts), "prompts", use_tqdm) as advance:
            numbers: dict[str, int] = {}
            if on_result is not None:
                numbers = {message.request_id: number for number, (message, _) in enumerate(source.prepared)}

            def done(state: GenerationRequestState) -> None:
                advance(state.num_tokens)
                if on_result is not None:
                    on_result(numbers[state.id], state.result())

            states = self._driver.call_back(partial(engine.run, source, served), done)
        return [state.result() for state in states]

    def _stream(
        self,
        served: ServedModel,
        prompt: Prompt,
        params: SamplingParams | None,
        lora_request: LoRARequest | None,
        *,
        add_special_tokens: bool,
    ) -> Iterator[RequestOutput]:
        self._driver.check_open()
        prepared = served.inputs.prepare(
            self._engine.new_id(), prompt, params, lora_request=lora_request, add_special_tokens=add_special_tokens
        )
        yield from follow(self._driver, self._engine, prepared, served.description.name)

    def _model(self, name: str | None, *tasks: str) -> ServedModel:
        return self._engine.model(name, *tasks)


def follow(
    driver: InlineClient | LoopThread, engine: AsyncEngine, prepared: PreparedPrompt, model: str
) -> Iterator[RequestOutput]:
    """Yields the results of one request as they grow. Closing the iterator aborts the request."""

    async def next_result() -> tuple[RequestOutput | None, bool]:
        (state,) = await stream.mailbox.get()
        return state.next_result(), state.finished

    stream: RequestStream[GenerationRequestState] = driver.do(lambda: engine.read([prepared], model))
    reader = threading.get_ident()
    try:
        finished = False
        while not finished:
            reader = threading.get_ident()
            result, finished = driver.call(next_result())
            if result is not None:
                yield result
    finally:
        driver.later(partial(engine.end, stream, failed=False), in_reader=reader == threading.get_ident())


def _close_in(pid: int, close: Callable[[], None]) -> None:
    """Not in a fork of the process: replicas are the parent's, and threads do not exist there."""
    if pid == os.getpid():
        close()


# LLMEngine: vLLM's engine of one step at a time.


class LLMEngine(StepEngine):
    """An LLM to which requests are added at any time. `llm` is the LLM, to close.

    engine = LLMEngine.from_engine_args(EngineArgs(model="path/to/model"))
    engine.add_request("0", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text)
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(LLM.from_engine_args(engine_args))
