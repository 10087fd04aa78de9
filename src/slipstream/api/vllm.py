"""vLLM's names besides LLM and its relatives: arguments, prompts, configurations, and what methods have no use for.

docs/vllm.md lists what each does here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Self, TypedDict, get_args, get_type_hints

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.config.config import EngineConfig
from slipstream.config.options import Options
from slipstream.config.vllm_args import NO_EFFECT, REFUSED, TRANSLATED
from slipstream.front.served import FrontEndArgs


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str  # its text, for the result
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    prompt_embeds: Any  # a torch tensor or numpy array [tokens, hidden size]
    prompt: str  # its text, for the result
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt

_UNUSED = {
    "tokenization_kwargs": "give truncate_prompt_tokens in the parameters",
    "mm_processor_kwargs": "models read text only",
    "trace_headers": "traces are those of slipstream serve",
    "data_parallel_rank": "one device runs the whole model",
    "reasoning_ended": "a thinking budget follows the text of the prompt",
    "reset_connector": "cached pages of other engines are copied when they are used",
    "reasoning_parser_kwargs": "parsers have no arguments",
}


def check_unused(given: Mapping[str, Any], *known: str) -> None:
    """Raises for arguments of a method that are not in this list, or whose value is not None or empty."""
    for name in given:
        if name not in known:
            raise TypeError(f"unexpected argument {name!r}")
    refuse_unused(**given)


def refuse_unused(**given: Any) -> None:
    """Raises for an argument of vLLM that this engine does not use, unless it is None or empty."""
    for name, value in given.items():
        if value not in (None, {}, [], False):
            raise InvalidParams(f"{name} is not supported: {_UNUSED[name]}", param=name)


# The fields of vLLM's model_config and vllm_config that scripts read.


class ModelConfigView(msgspec.Struct, frozen=True):
    model: str
    tokenizer: str
    served_model_name: str
    max_model_len: int
    seed: int
    enforce_eager: bool
    enable_sleep_mode: bool
    dtype: Any  # a torch dtype
    head_dtype: Any  # a torch dtype: scores behind a pooling are computed in float32 at least
    architecture: str
    runner_type: str  # generate or pooling
    embedding_size: int  # values of an embedding
    hf_config: SimpleNamespace
    """The fields of config.json; `id2label` has numbers as keys, as in transformers. A GGUF file has none: see the
    methods."""
    _info: ModelInfo
    is_encoder_decoder: bool = False
    is_multimodal_model: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        model, info, torch = config.model, config.model.info, sys.modules["torch"]
        dtype, fields = getattr(torch, model.dtype), dict(info.extra)
        if isinstance(labels := fields.get("id2label"), dict):
            fields["id2label"] = {int(key): label for key, label in labels.items()}
        return cls(
            model=model.path,
            tokenizer=model.path,
            served_model_name=model.name,
            max_model_len=config.scheduler.max_model_len,
            seed=config.scheduler.seed,
            enforce_eager=config.device.eager,
            enable_sleep_mode=config.device.sleep_mode,
            dtype=dtype,
            head_dtype=dtype if model.generates else torch.promote_types(dtype, torch.float32),
            architecture=info.architecture,
            runner_type="generate" if model.generates else "pooling",
            embedding_size=info.hidden_size if model.pooling is None else model.pooling.embed_size,
            hf_config=SimpleNamespace(**fields),
            _info=info,
        )

    @property
    def architectures(self) -> list[str]:
        return [self.architecture]

    @property
    def hf_text_config(self) -> SimpleNamespace:
        return self.hf_config

    def get_vocab_size(self) -> int:
        return self._info.vocab_size

    def get_hidden_size(self) -> int:
        return self._info.hidden_size

    def get_head_size(self) -> int:
        return self._info.head_dim

    def get_total_num_kv_heads(self) -> int:
        return self._info.num_kv_heads

    def get_total_num_hidden_layers(self) -> int:
        return self._info.num_layers


class VllmConfigView(msgspec.Struct, frozen=True):
    model_config: ModelConfigView
    cache_config: SimpleNamespace
    scheduler_config: SimpleNamespace
    parallel_config: SimpleNamespace

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        cache, own, num_ranks = config.cache, config.scheduler, config.model.num_ranks
        return cls(
            ModelConfigView.of(config),
            SimpleNamespace(
                gpu_memory_utilization=config.device.gpu_memory_utilization,
                enable_prefix_caching=cache.prefix_caching and not own.is_encoder,
                block_size=cache.page_size,  # positions
                num_gpu_blocks=cache.num_pages - 1,  # without the null page
            ),
            SimpleNamespace(
                max_num_seqs=own.max_num_seqs,
                max_num_batched_tokens=own.max_num_batched_tokens,
                max_model_len=own.max_model_len,
                enable_chunked_prefill=own.chunked_prefill,
                async_scheduling=own.depth > 0,
            ),
            SimpleNamespace(
                tensor_parallel_size=num_ranks,
                data_parallel_size=1,
                data_parallel_rank=0,
                pipeline_parallel_size=1,
                world_size=num_ranks,
            ),
        )


_TRANSFER = "update_weights alone replaces weights, from a folder, tensors or received_weights"
NOT_SUPPORTED = {
    "enqueue": "use llm_engine.add_request",
    "enqueue_chat": "use llm_engine.add_request",
    "wait_for_completion": "use llm_engine.step",
    "reset_mm_cache": "models read text only",
    "init_weight_transfer_engine": _TRANSFER,
    "start_weight_update": _TRANSFER,
    "finish_weight_update": _TRANSFER,
}
"""Methods of vLLM's LLM that this one does not have, and what to do instead."""


# EngineArgs, as scripts for vLLM use it. Imported only where it is used: a dataclass of 239 fields takes 20 ms.

_FRONT_END = (*FrontEndArgs.__struct_fields__, "use_tqdm_on_load", "spec_method", "spec_tokens")
_NAMES = dict.fromkeys(("model", *Options.__struct_fields__, *_FRONT_END, *TRANSLATED, *REFUSED, *NO_EFFECT))

_Args: Any = dataclasses.make_dataclass("_Args", [(name, Any, None) for name in _NAMES])


class EngineArgs(_Args):  # type: ignore[misc]
    """The arguments of `LLM`, for `from_engine_args`. A dataclass; None is the default of each field."""

    def given(self) -> dict[str, Any]:
        """The arguments that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each argument to a parser of argparse, and returns the parser."""
        add_engine_flags(parser, _NAMES)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments among those that a parser has read."""
        return cls(**{name: getattr(args, name) for name in _NAMES if hasattr(args, name)})


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM`."""


# Command-line flags of EngineArgs, for scripts that make their own parser (`EngineArgs.add_cli_args`).

SHORT = {
    "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep", "decode_context_parallel_size": "-dcp", "prefill_context_parallel_size": "-pcp",
    "data_parallel_rank": "-dpn", "data_parallel_start_rank": "-dpr", "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa", "data_parallel_rpc_port": "-dpp", "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph", "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm", "nnodes": "-n", "node_rank": "-r", "quantization": "-q",
    "speculative_config": "-sc", "diffusion_config": "-dc", "compilation_config": "-cc", "attention_config": "-ac",
}  # fmt: skip
"""Short flags of vLLM, by argument."""


def add_engine_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds a flag for each argument; None is the default of each. A value is text or JSON, by the option's type."""
    group = parser.add_argument_group("engine arguments")
    kinds = {name: set(get_args(hint)) or {hint} for name, hint in get_type_hints(Options).items()}
    for name in names:
        flags, kind = _spellings(name), kinds.get(name, {Any})
        if bool in kind and kind <= {bool, type(None)}:
            group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, default=None)
        elif kind <= {str, type(None)}:
            group.add_argument(*flags, dest=name, default=None)
        else:  # without a value it is a switch
            group.add_argument(*flags, dest=name, nargs="?", const=True, type=_value, default=None)


def _spellings(name: str) -> list[str]:
    flags = [f"--{name.replace('_', '-')}"]
    flags += [f"--{name}"] if "_" in name else []
    return [*flags, SHORT[name]] if name in SHORT else flags


def _value(text: str) -> Any:
    """Numbers, booleans, objects and lists of JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
