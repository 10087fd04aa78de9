"""LLM: generation and pooling for scripts. The core and its caller share one thread; nothing runs between calls."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from slipstream.config.config import EngineConfig
from slipstream.config.options import options_of
from slipstream.device.device import Device
from slipstream.engine.core import EngineCore
from slipstream.engine.gc_freeze import frozen_gc
from slipstream.engine.progress import progress
from slipstream.errors import InvalidParams, InvalidPrompt
from slipstream.frontend import pooling_calls
from slipstream.frontend.in_process import build_served
from slipstream.frontend.inputs import InputProcessor, Message, Prompt
from slipstream.frontend.pool_results import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from slipstream.frontend.pooling_calls import PoolParams, PoolPrompts, Texts
from slipstream.frontend.prompts import Prompts
from slipstream.frontend.results import RequestOutput
from slipstream.frontend.served import POOLING_TASKS, SCORING, ServedModel, choose
from slipstream.frontend.sync_loop import SyncLoop
from slipstream.params import SamplingParams
from slipstream.pooling_params import PoolingParams, Task
from slipstream.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
T = TypeVar("T")


class LLM:
    """A model to call from Python.

        with LLM() as llm:
            print(llm.generate("Once upon a time")[0].outputs[0].text)

        with LLM(task="embed") as llm:
            vector = llm.embed("Once upon a time")[0].outputs.embedding

    With no model it runs the embedded SmolLM2, or MiniLM for vectors. The options are those of `config/options.py`.
    Several models share one engine as `models={"chat": MODEL, "embed": {"task": "embed"}}`: each verb goes to the
    model that is made for it, or to the one named by `model`. Threads may share it too: their calls take turns, streams
    result by result, and `close` waits for another thread's call.
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
        options.setdefault("max_itl", 0.0)  # nobody reads along
        given = options_of(model, models, options)
        lanes, self.models = build_served(given, progress=use_tqdm_on_load, device=_device)
        self.cores = lanes.cores
        self._configs = {name: core.config for name, core in self.cores.items()}
        self._sync_loop = SyncLoop(lanes)
        self._numbers = itertools.count()
        self._free = weakref.finalize(self, lanes.close)  # also when nobody closes it

    @property
    def core(self) -> EngineCore:
        """Of the first model."""
        self._sync_loop.check_open()
        return next(iter(self.cores.values()))

    @property
    def config(self) -> EngineConfig:
        """Of the first model."""
        return next(iter(self._configs.values()))

    @property
    def inputs(self) -> InputProcessor:
        """Of the model that continues text."""
        return self._model(None, "generate").inputs

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the first model."""
        return next(iter(self.models.values())).tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str] | None = None,
        model: str | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched as the machine allows. Results come in the order of the prompts.

        `priority` and `cache_salt`, one for all or one each, count more than those of the parameters.
        """
        batch = _as_batch(prompts)
        served = self._model(model, "generate")
        return self._run(served, batch, sampling_params, use_tqdm, priority, cache_salt, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        allow_control_tokens: bool | None = None,
        model: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        Text of messages that spells a control token, such as <|im_end|>, stays text; `allow_control_tokens` lets it be
        the token.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        served = self._model(model, "generate")
        texts = [
            served.inputs.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                allow_control_tokens=allow_control_tokens,
            )
            for conversation in conversations
        ]
        # the template has put the special tokens where it wants them
        return self._run(served, texts, sampling_params, use_tqdm, None, None, add_special_tokens=False)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, model: str | None = None
    ) -> Iterator[RequestOutput]:
        """One prompt, its results as they grow. Leaving the loop early aborts it."""
        return self._stream(self._model(model, "generate"), prompt, sampling_params, add_special_tokens=True)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        model: str | None = None,
        **template: Any,
    ) -> Iterator[RequestOutput]:
        served = self._model(model, "generate")
        text = served.inputs.render_chat(messages, **template)
        return self._stream(served, text, sampling_params, add_special_tokens=False)

    def encode(
        self,
        prompts: PoolPrompts,
        pooling_params: PoolParams = None,
        *,
        pooling_task: Task | None = None,
        use_tqdm: bool = True,
        model: str | None = None,
        **how: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """The numbers of each prompt for any task: embed, classify, token_embed, token_classify or sparse.

        A prompt is a text, token ids, an object with `prompt` or `prompt_token_ids`, or a pair of texts. `how`:
        prompt_name or prompt (what to put before texts) and truncate_prompt_tokens.
        """
        served = self._model(model, *([pooling_task] if pooling_task else POOLING_TASKS))
        call = pooling_calls.encode(served.require_pooling(), prompts, pooling_params, pooling_task, **how)
        return self._call(served, call, use_tqdm)

    def embed(
        self,
        prompts: PoolPrompts,
        pooling_params: PoolParams = None,
        *,
        use_tqdm: bool = True,
        model: str | None = None,
        **how: Any,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt: `outputs.embedding` as a list, `outputs.data` as an array. `how`: see `encode`."""
        served = self._model(model, "embed")
        call = pooling_calls.encode(served.require_pooling(), prompts, pooling_params, "embed", **how)
        return self._call(served, call, use_tqdm)

    def classify(
        self,
        prompts: PoolPrompts,
        pooling_params: PoolParams = None,
        *,
        use_tqdm: bool = True,
        model: str | None = None,
        **how: Any,
    ) -> list[ClassificationRequestOutput]:
        """How likely each class is: `outputs.probs`, and `outputs.label` of the likeliest."""
        served = self._model(model, "classify")
        call = pooling_calls.encode(served.require_pooling(), prompts, pooling_params, "classify", **how)
        return self._call(served, call, use_tqdm)

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        model: str | None = None,
        **how: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, as `outputs.score`: one with one, one with each of many, or each with its own.

        `how`: instruction (where the model takes one), prompt_name and truncate_prompt_tokens.
        """
        served = self._model(model, *SCORING)
        call = pooling_calls.score(served.require_pooling(), data_1, data_2, pooling_params, **how)
        return self._call(served, call, use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        model: str | None = None,
        **how: Any,
    ) -> list[RerankResult]:
        """The documents, the best answer to the query first, each with index, score and text. `how`: see `score`."""
        served = self._model(model, *SCORING)
        call = pooling_calls.rerank(served.require_pooling(), query, documents, pooling_params, top_n=top_n, **how)
        return self._call(served, call, use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        return self.inputs.default_params()

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def close(self) -> None:
        """Free the model, the cache and the device's thread, once the call of another thread has ended."""
        with self._sync_loop.lock:
            if not self._sync_loop.closed:
                self._sync_loop.close()
                self._free()
                self.cores.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        served: ServedModel,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
        cache_salt: str | Sequence[str] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        self._sync_loop.check_open()
        params = _spread("sampling_params", sampling_params, len(prompts))
        priorities = _spread("priority", priority, len(prompts))
        salts = _spread("cache_salt", cache_salt, len(prompts))
        # every prompt is checked before any runs; then texts may be encoded while the device works
        asked = Prompts(
            served.inputs,
            prompts,
            params,
            self._new_id,
            priorities=priorities,
            salts=salts,
            add_special_tokens=add_special_tokens,
        )
        submits = asked if asked.is_sure else list(asked)
        with self._sync_loop.turn(), progress(len(prompts), "prompts", use_tqdm) as advance:
            late = self._sync_loop.may_be_late(served, asked.asked)
            tracks = self._sync_loop.run(served, submits, advance, late=late)
        return [track.result() for track in tracks]

    def _call(self, served: ServedModel, call: pooling_calls.Call[T], use_tqdm: bool) -> T:
        """Run a verb of pooling: what it asks for, until it has what it wants."""
        self._sync_loop.check_open()
        try:
            batches = next(call)
            with progress(sum(batch.num_of_call for batch in batches), "prompts", use_tqdm) as advance:
                while True:
                    feed = pooling_calls.Feed(served.require_pooling(), batches, self._new_id)
                    with self._sync_loop.turn(), frozen_gc():
                        tracks = self._sync_loop.run(served, feed, advance, late=feed.is_level)
                        found = feed.results(tracks)  # type: ignore[arg-type]
                    batches = call.send(found)
        except StopIteration as end:
            result: T = end.value
            return result

    def _stream(
        self, served: ServedModel, prompt: Prompt, params: SamplingParams | None, *, add_special_tokens: bool
    ) -> Iterator[RequestOutput]:
        self._sync_loop.check_open()
        prepared = served.inputs.submit(self._new_id(), prompt, params, add_special_tokens=add_special_tokens)
        yield from self._sync_loop.stream(served, prepared)

    def _new_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def _model(self, name: str | None, *tasks: str) -> ServedModel:
        return choose(self.models, name, *tasks)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt, or a list of them: a list of whole numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidPrompt(f"prompts is {type(prompts).__name__}; give a string, token ids, or a list of prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _spread(name: str, value: object, count: int) -> Sequence[Any]:
    """One value for all, or one each."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise InvalidParams(f"there are {count} prompts and {len(value)} {name}; give one for all or one each")
        return value
    return [value] * count
