"""ServedModel: a model as the front end uses it (description, tokenizer, input processing), and the choice of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from slipstream.base.errors import InvalidOption, InvalidParams, ModelNotFound
from slipstream.engine.model_description import ModelDescription
from slipstream.front.inputs import InputProcessor
from slipstream.front.param_checks import StructuredOutputsConfig, read_structured_config
from slipstream.front.pooling_inputs import PoolingInputs
from slipstream.params.lora import LoRARequest
from slipstream.params.values import check_text
from slipstream.parsers.families import check_parsers
from slipstream.text.script_tokenizer import ScriptTokenizer, script_tokenizer
from slipstream.text.tokenizer import Tokenizer


class ServedModel(msgspec.Struct, frozen=True):
    description: ModelDescription
    tokenizer: Tokenizer | None
    inputs: InputProcessor
    pooling_inputs: PoolingInputs | None = None  # None if the model only generates
    lora: LoRARequest | None = None  # of an adapter that requests name as their model
    base: str = ""  # the base model of such an adapter

    @classmethod
    def load(cls, description: ModelDescription) -> ServedModel:
        """Loads the tokenizer, which may take a second."""
        return cls.of(description, description.load_tokenizer())

    @classmethod
    def of(cls, description: ModelDescription, tokenizer: Tokenizer | None) -> ServedModel:
        pooling_inputs = None if description.pooling is None else PoolingInputs(description, tokenizer)
        return cls(description, tokenizer, InputProcessor(description, tokenizer), pooling_inputs)

    @property
    def script_tokenizer(self) -> ScriptTokenizer | None:
        """The tokenizer with the methods of a transformers tokenizer."""
        return None if self.tokenizer is None else script_tokenizer(self.tokenizer, self.description.tokenizer or "")

    @property
    def base_name(self) -> str:
        """The name of the model in the engine: of an adapter, that of its base model."""
        return self.base or self.description.name

    def with_adapter(self, lora: LoRARequest) -> ServedModel:
        """This model with an adapter, under the name of the adapter."""
        description = msgspec.structs.replace(self.description, name=lora.lora_name, adapters=())
        return msgspec.structs.replace(self, description=description, lora=lora, base=self.description.name)

    def can(self, task: str) -> bool:
        """`task`: generate, a pooling task, or score. Classify includes models with one class; score is for these."""
        pooling = self.description.pooling
        if pooling is None or task == "generate":
            return task == "generate" and self.description.generates
        if task == "score":
            return "classify" in pooling.tasks and pooling.num_labels == 1
        return task in pooling.tasks

    @property
    def tasks(self) -> list[str]:
        """Tasks of the model: generate, and pooling tasks."""
        pooling = self.description.pooling
        return [*(["generate"] if self.description.generates else []), *(() if pooling is None else pooling.tasks)]

    @property
    def max_num_tokens(self) -> int:
        """The longest text in tokens: max_seq_length of a model that only pools, where its files have one, else the
        model length."""
        pooling, limit = self.description.pooling, self.description.max_model_len
        if pooling is None or pooling.generates or pooling.max_seq_length is None:
            return limit
        return min(limit, pooling.max_seq_length)

    def require_pooling(self) -> PoolingInputs:
        """Returns the input processing for pooling; raises if the model only generates."""
        if self.pooling_inputs is None:
            raise InvalidParams(f"{self.description.name} only generates; use a model that embeds or classifies")
        return self.pooling_inputs


def choose(
    models: Mapping[str, ServedModel], name: str | None, *tasks: str, adapters: Mapping[str, ServedModel] | None = None
) -> ServedModel:
    """Returns the model or adapter of that name. Without a name: the best model for the first task that a model can do.

    A model that only pools is preferred for pooling. Where no model can do any of the tasks, the first model is
    returned, whose input processing raises the error.
    """
    if name is not None:
        check_text("model", name)
    if name:
        if adapters is not None and name in adapters:
            return adapters[name]
        if name not in models:
            raise ModelNotFound(
                f"there is no model {name!r} here; there is {', '.join([*models, *(adapters or ())]) or 'none yet'}"
            )
        return models[name]
    if not models:
        raise ModelNotFound("there is no model here yet; wait until the engine is ready")
    for task in tasks:
        able = [model for model in models.values() if model.can(task)]
        # any generating model can also embed, but an embedding model does it better
        specialised = [model for model in able if task == "generate" or not model.can("generate")]
        if able:
            return (specialised or able)[0]
    return next(iter(models.values()))


POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "sparse")
SCORING = ("score", "embed", "token_embed")
"""Tasks by which pairs can be scored, the best first."""


# FrontEndArgs: arguments of `LLM` and `AsyncEngine` that concern only the front end; the server has flags for them.


class ProfilerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of vLLM's ProfilerConfig that is supported."""

    profiler: Literal["torch"]
    torch_profiler_dir: str
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False


def read_profiler_config(given: object) -> ProfilerConfig | None:
    """From an object or its JSON; None for one that configures nothing."""
    try:
        if isinstance(given, str | bytes):
            given = msgspec.json.decode(given)
        return None if given == {} else msgspec.convert(given, ProfilerConfig)
    except msgspec.MsgspecError as error:
        fields = ", ".join(ProfilerConfig.__struct_fields__)
        raise InvalidOption(f"profiler_config: {error}; give profiler torch and {fields}") from None


class FrontEndArgs(msgspec.Struct, frozen=True):
    max_logprobs: int | None = None  # limit of logprobs and prompt_logprobs of a request; None or -1: none
    disable_log_stats: bool | None = True  # no statistics of requests, for `LLM.get_metrics`; an AsyncEngine has them
    profiler_config: ProfilerConfig | None = None  # for `LLM.start_profile`
    structured_outputs_config: StructuredOutputsConfig | None = None  # defaults of structured output
    reasoning_parser: str | None = None  # how models mark reasoning, for thinking budgets; None: by the chat template

    @classmethod
    def take(cls, options: dict[str, Any]) -> FrontEndArgs:
        """Removes these arguments from the options, and checks them."""
        given = {name: options.pop(name) for name in cls.__struct_fields__ if name in options}
        if given.get("profiler_config") is not None:
            given["profiler_config"] = read_profiler_config(given["profiler_config"])
        if given.get("structured_outputs_config") is not None:
            config = given["structured_outputs_config"] = read_structured_config(given["structured_outputs_config"])
            given["reasoning_parser"] = given.get("reasoning_parser") or config.reasoning_parser
        found = cls(**given)
        limit = found.max_logprobs
        if limit is not None and (type(limit) is not int or limit < -1):
            raise InvalidOption(f"max_logprobs is {limit!r:.50}; give a number from 0 up, or -1 for no limit")
        if not isinstance(found.reasoning_parser, str | None):
            raise InvalidOption(f"reasoning_parser is {found.reasoning_parser!r:.50}; give the name of a parser")
        if found.reasoning_parser:
            check_parsers(found.reasoning_parser, None)
        return found

    def check_async(self) -> None:
        """Raises for arguments that only `LLM` has."""
        if self.profiler_config is not None:
            raise InvalidOption("profiler_config is for LLM.start_profile; use torch.profiler around the engine")

    def apply(self, models: Iterable[ServedModel]) -> None:
        for model in models:
            model.inputs.checks.max_logprobs = None if self.max_logprobs == -1 else self.max_logprobs
            model.inputs.checks.structured_config = self.structured_outputs_config
            model.inputs.reasoning_parser = self.reasoning_parser or None
