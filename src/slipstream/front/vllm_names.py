"""Names that scripts for vLLM import besides LLM: prompts, and what methods have no use for.

docs/vllm.md lists what each does here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn, TypedDict

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.config.config import EngineConfig


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


def refuse_running_reset() -> NoReturn:
    """Raises for `reset_running_requests` of engines that run in another thread or process."""
    raise InvalidParams(
        "reset_running_requests is for LLM and LLMEngine with one replica; use pause_generation(mode='wait') first",
        param="reset_running_requests",
    )


# ModelConfigView and VllmConfigView: the fields of vLLM's model_config and vllm_config that scripts read.


class ModelConfigView(msgspec.Struct, frozen=True):
    config: EngineConfig

    @property
    def model(self) -> str:
        return self.config.model.path

    @property
    def tokenizer(self) -> str:
        return self.config.model.path

    @property
    def served_model_name(self) -> str:
        return self.config.model.name

    @property
    def max_model_len(self) -> int:
        return self.config.scheduler.max_model_len

    @property
    def seed(self) -> int:
        return self.config.scheduler.seed

    @property
    def enforce_eager(self) -> bool:
        return self.config.device.eager

    @property
    def enable_sleep_mode(self) -> bool:
        return self.config.device.sleep_mode

    @property
    def dtype(self) -> Any:
        """A torch dtype."""
        return getattr(sys.modules["torch"], self.config.model.dtype)

    @property
    def head_dtype(self) -> Any:
        """A torch dtype: scores behind a pooling are computed in float32 at least."""
        torch = sys.modules["torch"]
        pools = not self.config.model.generates
        return torch.promote_types(self.dtype, torch.float32) if pools else self.dtype

    @property
    def architecture(self) -> str:
        return self.config.model.info.architecture

    @property
    def architectures(self) -> list[str]:
        return [self.architecture]

    @property
    def runner_type(self) -> str:
        return "generate" if self.config.model.generates else "pooling"

    @property
    def is_encoder_decoder(self) -> bool:
        return False

    @property
    def is_multimodal_model(self) -> bool:
        return False

    @property
    def hf_config(self) -> SimpleNamespace:
        """The fields of config.json; `id2label` has numbers as keys, as in transformers. A GGUF file has none: see the
        methods."""
        fields = dict(self.config.model.info.extra)
        if isinstance(labels := fields.get("id2label"), dict):
            fields["id2label"] = {int(key): label for key, label in labels.items()}
        return SimpleNamespace(**fields)

    @property
    def hf_text_config(self) -> SimpleNamespace:
        return self.hf_config

    def get_vocab_size(self) -> int:
        return self.config.model.info.vocab_size

    def get_hidden_size(self) -> int:
        return self.config.model.info.hidden_size

    @property
    def embedding_size(self) -> int:
        """Values of an embedding."""
        pooling = self.config.model.pooling
        return self.get_hidden_size() if pooling is None else pooling.embed_size

    def get_head_size(self) -> int:
        return self.config.model.info.head_dim

    def get_total_num_kv_heads(self) -> int:
        return self.config.model.info.num_kv_heads

    def get_total_num_hidden_layers(self) -> int:
        return self.config.model.info.num_layers


class CacheConfigView(msgspec.Struct, frozen=True):
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    block_size: int  # positions of a page
    num_gpu_blocks: int


class SchedulerConfigView(msgspec.Struct, frozen=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    async_scheduling: bool


class ParallelConfigView(msgspec.Struct, frozen=True):
    tensor_parallel_size: int
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    world_size: int = 1


class VllmConfigView(msgspec.Struct, frozen=True):
    config: EngineConfig

    @property
    def model_config(self) -> ModelConfigView:
        return ModelConfigView(self.config)

    @property
    def cache_config(self) -> CacheConfigView:
        cache = self.config.cache
        share = self.config.device.gpu_memory_utilization
        pages = cache.num_pages - 1  # without the null page
        is_cached = cache.prefix_caching and not self.config.scheduler.is_encoder
        return CacheConfigView(share, is_cached, cache.page_size, pages)

    @property
    def scheduler_config(self) -> SchedulerConfigView:
        own = self.config.scheduler
        return SchedulerConfigView(
            own.max_num_seqs, own.max_num_batched_tokens, own.max_model_len, own.chunked_prefill, own.depth > 0
        )

    @property
    def parallel_config(self) -> ParallelConfigView:
        return ParallelConfigView(self.config.model.num_ranks, world_size=self.config.model.num_ranks)
