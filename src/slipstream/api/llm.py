"""LLM: generation and pooling for scripts. The engine runs in the caller's thread, and nothing runs between calls."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from slipstream.api.pooling_methods import PoolingMethods
from slipstream.api.vllm import StepEngine, VllmMethods
from slipstream.base.errors import InvalidOption, InvalidParams, InvalidPrompt
from slipstream.base.log import progress
from slipstream.base.processes import frozen_gc
from slipstream.config.config import EngineConfig
from slipstream.config.options import options_of
from slipstream.device.device import Device
from slipstream.engine.core import EngineCore
from slipstream.front.beam_search import (
    BeamGrammar,
    BeamGrammars,
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    BeamStep,
)
from slipstream.front.core_state import AdapterNames
from slipstream.front.in_process import build_served, configs
from slipstream.front.inputs import InputProcessor, Message, Prompt
from slipstream.front.prompts import GenerationPrompts, as_batch, per_prompt
from slipstream.front.replica_loop import ReplicaLoop
from slipstream.front.request_state import GenerationRequestState
from slipstream.front.results import Logprob, RequestOutput
from slipstream.front.served import FrontEndArgs, ServedModel, choose
from slipstream.front.sync_loop import SyncLoop
from slipstream.front.vllm_names import check_unused, refuse_unused
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.record.record_file import write_private
from slipstream.record.step_log import StepLog, chrome_trace, stop
from slipstream.text.tokenizer import Tokenizer
from slipstream.transport.replicas import has_replicas

if TYPE_CHECKING:
    from slipstream.api.vllm import EngineArgs
    from slipstream.metrics.prometheus import Metric


Params = SamplingParams | Sequence[SamplingParams] | None
OnResult = Callable[[int, RequestOutput], None]
OneOrMoreAdapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(PoolingMethods, VllmMethods):
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
        self._front_end = front_end = FrontEndArgs.take(options)
        given = options_of(model, models, options)
        self._request_numbers = itertools.count()
        self._adapter_names = AdapterNames()
        self._beam_grammars = BeamGrammars()
        self._sync_loop: SyncLoop | ReplicaLoop
        self.cores: dict[str, EngineCore] = {}  # empty with replicas, which run in other processes
        if has_replicas(given):
            self._sync_loop = replicas = ReplicaLoop(given)
            self.models = replicas.engine.models
            front_end.apply(self.models.values())
            self._configs = configs(given)
            # also without a call of `close`
            self._free = weakref.finalize(self, _close_in, os.getpid(), replicas.close)
            return
        lanes, self.models = build_served(given, progress=use_tqdm_on_load, device=_device)
        front_end.apply(self.models.values())
        self.cores = lanes.cores
        self._configs = {name: core.config for name, core in self.cores.items()}
        self._sync_loop = SyncLoop(lanes, with_stats=front_end.disable_log_stats is False)
        self._free = weakref.finalize(self, _close_in, os.getpid(), lanes.close)

    @property
    def core(self) -> EngineCore:
        """The core of the first model."""
        self._sync_loop.check_open()
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
        batch = as_batch(prompts)
        served = self._model(model, "generate")
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
            served.inputs.render_chat(
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
        return self._run(
            served, texts, sampling_params, use_tqdm, None, None, lora_request, on_result, add_special_tokens=False
        )

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
        prepared = [served.inputs.prepare(self._new_id(), prompt, step)[0] for prompt in as_batch(prompts)]
        if any(each.prompt_embeds is not None for each in prepared):
            raise InvalidPrompt("beam_search extends token ids, and a prompt is prompt_embeds; use generate")
        searches = [BeamSearch(each.prompt_token_ids, params, served.description) for each in prepared]
        grammar = self._beam_grammars.compile(served, params)
        at_once = len(searches) if concurrency_limit is None else max(concurrency_limit, 1)
        parts = [searches[start : start + at_once] for start in range(0, len(searches), at_once)]
        generate = partial(self.generate, use_tqdm=False, lora_request=lora_request, model=model)
        with progress(params.max_tokens * len(parts), "steps", use_tqdm) as advance:
            for part in parts:
                search_to_the_end(part, step, grammar, generate, advance)
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
        return self._stream(served, prompt, sampling_params, lora_request, add_special_tokens=True)

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
        text = served.inputs.render_chat(messages, **template)
        return self._stream(served, text, sampling_params, lora_request, add_special_tokens=False)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clears the prefix caches of all models. Returns True.

        Running requests keep their pages; with `reset_running_requests` they are computed again from their tokens.
        """
        refuse_unused(reset_connector=reset_connector)
        self._sync_loop.reset_prefix_cache(reset_running_requests=reset_running_requests)
        return True

    def save_record(self, path: str | Path, *, model: str | None = None, redact: bool = False) -> None:
        """Writes the last steps to a file, for `slipstream replay`. `redact`: without token ids and texts."""
        with self._own_loop().turn():
            core = self.core if model is None else self.cores[self._model(model).base_name]
            if core.recorder is None:
                raise InvalidOption("record_steps is 0, so nothing is recorded; give a number of steps")
            write_private(Path(path), core.recorder.take().encode(redact=redact))

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Writes times of all steps within the `with` block to a file, which ui.perfetto.dev opens."""
        loop = self._own_loop()
        with loop.turn():
            log = StepLog(self.cores)
        try:
            yield
        finally:
            with loop.turn():
                stop(self.cores)
            Path(path).write_bytes(chrome_trace(log.models, list(log.steps)))

    def close(self) -> None:
        """Frees the model, the cache and the device's thread. Waits for the call of another thread. In a fork of the
        process that made the LLM it does nothing."""
        if self._sync_loop.pid != os.getpid():
            return
        if isinstance(self._sync_loop, SyncLoop):
            self._sync_loop.check_no_step()
        with self._sync_loop.lock:
            if not self._sync_loop.closed:
                self._sync_loop.close()
                self._free()
                self._beam_grammars.close()
                self.cores.clear()

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
        self._sync_loop.check_open()
        # every prompt is checked before the first one runs; texts may be tokenised while the device computes
        source = GenerationPrompts(
            served.inputs,
            prompts,
            per_prompt("sampling_params", sampling_params, len(prompts)),
            self._new_id,
            priorities=per_prompt("priority", priority, len(prompts)),
            salts=per_prompt("cache_salt", cache_salt, len(prompts)),
            adapters=per_prompt("lora_request", served.lora if lora_request is None else lora_request, len(prompts)),
            add_special_tokens=add_special_tokens,
        )
        submits = source if source.is_sure else list(source)
        with self._sync_loop.turn(), progress(len(prompts), "prompts", use_tqdm) as advance:
            follows = self._sync_loop.may_follow(served, source.prepared)
            numbers: dict[str, int] = {}
            if on_result is not None:
                numbers = {message.request_id: number for number, (message, _) in enumerate(source.prepared)}

            def done(state: GenerationRequestState) -> None:
                advance(state.num_tokens)
                if on_result is not None:
                    on_result(numbers[state.id], state.result())

            states = self._sync_loop.run(served, submits, done, follows=follows)
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
        self._sync_loop.check_open()
        prepared = served.inputs.prepare(
            self._new_id(),
            prompt,
            params,
            lora_request=lora_request or served.lora,
            add_special_tokens=add_special_tokens,
        )
        yield from self._sync_loop.stream(served, prepared)

    def _new_id(self) -> str:
        return str(next(self._request_numbers))  # as in vLLM

    def _model(self, name: str | None, *tasks: str) -> ServedModel:
        return choose(self.models, name, *tasks, adapters=self._adapter_names.of(self.models))


def _close_in(pid: int, close: Callable[[], None]) -> None:
    """Not in a fork of the process: replicas are the parent's, and threads do not exist there."""
    if pid == os.getpid():
        close()


# LLMEngine: vLLM's engine of one step at a time.

T = TypeVar("T")


class LLMEngine(StepEngine):
    """An LLM to which requests are added at any time. `llm` is the LLM, to close.

    engine = LLMEngine.from_engine_args(EngineArgs(model="path/to/model"))
    engine.add_request("0", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text)
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.models, llm._own_loop())
        self.llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(LLM.from_engine_args(engine_args))

    # methods of `LLM`

    def get_metrics(self) -> list[Metric]:
        return self.llm.get_metrics()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self.llm.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        self.llm.stop_profile()

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        return self.llm.apply_model(func)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return self.llm.collective_rpc(method, timeout, args, kwargs)


# Beam search by calls of an engine in the caller's thread: each call generates one token for every beam.
#
# The HTTP routes have the same search over requests that run at once (`serve/http/generation/beam.py`).


class Generate(Protocol):
    def __call__(
        self, prompts: Sequence[list[int]], sampling_params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]: ...


def search_to_the_end(
    searches: Sequence[BeamSearch],
    step: SamplingParams,
    grammar: BeamGrammar | None,
    generate: Generate,
    advance: Callable[[int], object],
) -> None:
    """Runs searches side by side until all are finished. `step`: parameters of a call; `advance` gets the number of
    beams after each call."""
    while beams := [beam.tokens for search in searches for beam in search.beams]:
        steps = [BeamStep(step)] * len(beams)
        if grammar is not None:
            starts = [search.num_prompt for search in searches for _ in search.beams]
            steps = grammar.steps(step, beams, starts)
        entries = [
            own.kept(_entries(output))
            for own, output in zip(steps, generate(beams, [own.params for own in steps]), strict=True)
        ]
        for index, own in enumerate(steps):
            if not entries[index]:
                (output,) = generate([beams[index]], own.again())
                entries[index] = own.kept(_entries(output))
        rest = iter(entries)
        for search in searches:
            search.take([next(rest) for _ in search.beams])
        advance(len(beams))


def _entries(output: RequestOutput) -> Mapping[int, Logprob]:
    """The likeliest tokens of a request for one token."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "a step of a beam search asks for logprobs"
    return logprobs[0]
