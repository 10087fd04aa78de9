"""Slipstream: an LLM inference engine in which the host never makes the device wait.

Names are loaded when first used, so that importing the package costs nothing and never loads torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from slipstream.base import __version__

# Torch's wheels for ARM have an allocator of their own (mimalloc), which reads this when torch is loaded: milliseconds
# until freed memory goes back to the system. With its default, 10, every step faults in its pages again.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

if TYPE_CHECKING:
    from slipstream.api.async_llm import AsyncLLM as AsyncLLM
    from slipstream.api.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from slipstream.api.async_llm import StatLoggerBase as StatLoggerBase
    from slipstream.api.llm import LLM as LLM
    from slipstream.api.llm import LLMEngine as LLMEngine
    from slipstream.api.vllm import AsyncEngineArgs as AsyncEngineArgs
    from slipstream.api.vllm import EngineArgs as EngineArgs
    from slipstream.config.vllm_args import PoolerConfig as PoolerConfig
    from slipstream.front.async_engine import AsyncEngine as AsyncEngine
    from slipstream.front.beam_search import BeamSearchParams as BeamSearchParams
    from slipstream.front.pooling_results import ClassificationOutput as ClassificationOutput
    from slipstream.front.pooling_results import ClassificationRequestOutput as ClassificationRequestOutput
    from slipstream.front.pooling_results import EmbeddingOutput as EmbeddingOutput
    from slipstream.front.pooling_results import EmbeddingRequestOutput as EmbeddingRequestOutput
    from slipstream.front.pooling_results import PoolingOutput as PoolingOutput
    from slipstream.front.pooling_results import PoolingRequestOutput as PoolingRequestOutput
    from slipstream.front.pooling_results import ScoringOutput as ScoringOutput
    from slipstream.front.pooling_results import ScoringRequestOutput as ScoringRequestOutput
    from slipstream.front.results import CompletionOutput as CompletionOutput
    from slipstream.front.results import FlatLogprobs as FlatLogprobs
    from slipstream.front.results import Logprob as Logprob
    from slipstream.front.results import RequestOutput as RequestOutput
    from slipstream.front.vllm_names import EmbedsPrompt as EmbedsPrompt
    from slipstream.front.vllm_names import PromptType as PromptType
    from slipstream.front.vllm_names import TextPrompt as TextPrompt
    from slipstream.front.vllm_names import TokensPrompt as TokensPrompt
    from slipstream.nn.update import received_weights as received_weights
    from slipstream.params.lora import LoRARequest as LoRARequest
    from slipstream.params.pooling import PoolingParams as PoolingParams
    from slipstream.params.processors import AdapterLogitsProcessor as AdapterLogitsProcessor
    from slipstream.params.processors import BatchUpdate as BatchUpdate
    from slipstream.params.processors import LogitsProcessor as LogitsProcessor
    from slipstream.params.processors import MoveDirectionality as MoveDirectionality
    from slipstream.params.sampling import RequestOutputKind as RequestOutputKind
    from slipstream.params.sampling import SamplingParams as SamplingParams
    from slipstream.params.structured import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "AdapterLogitsProcessor": "slipstream.params.processors",
    "AsyncEngine": "slipstream.front.async_engine",
    "AsyncEngineArgs": "slipstream.api.vllm",
    "AsyncLLM": "slipstream.api.async_llm",
    "AsyncLLMEngine": "slipstream.api.async_llm",
    "BatchUpdate": "slipstream.params.processors",
    "BeamSearchParams": "slipstream.front.beam_search",
    "ClassificationOutput": "slipstream.front.pooling_results",
    "ClassificationRequestOutput": "slipstream.front.pooling_results",
    "CompletionOutput": "slipstream.front.results",
    "EmbeddingOutput": "slipstream.front.pooling_results",
    "EmbeddingRequestOutput": "slipstream.front.pooling_results",
    "EngineArgs": "slipstream.api.vllm",
    "FlatLogprobs": "slipstream.front.results",
    "LLM": "slipstream.api.llm",
    "LLMEngine": "slipstream.api.llm",
    "LogitsProcessor": "slipstream.params.processors",
    "Logprob": "slipstream.front.results",
    "MoveDirectionality": "slipstream.params.processors",
    "PoolerConfig": "slipstream.config.vllm_args",
    "PoolingOutput": "slipstream.front.pooling_results",
    "PoolingParams": "slipstream.params.pooling",
    "PoolingRequestOutput": "slipstream.front.pooling_results",
    "PromptType": "slipstream.front.vllm_names",
    "RequestOutput": "slipstream.front.results",
    "RequestOutputKind": "slipstream.params.sampling",
    "LoRARequest": "slipstream.params.lora",
    "SamplingParams": "slipstream.params.sampling",
    "ScoringOutput": "slipstream.front.pooling_results",
    "ScoringRequestOutput": "slipstream.front.pooling_results",
    "StatLoggerBase": "slipstream.api.async_llm",
    "StructuredOutputsParams": "slipstream.params.structured",
    "TextPrompt": "slipstream.front.vllm_names",
    "EmbedsPrompt": "slipstream.front.vllm_names",
    "TokensPrompt": "slipstream.front.vllm_names",
    "received_weights": "slipstream.nn.update",
}

__all__ = [
    "AdapterLogitsProcessor",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlatLogprobs",
    "LLM",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "MoveDirectionality",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StatLoggerBase",
    "StructuredOutputsParams",
    "TextPrompt",
    "EmbedsPrompt",
    "TokensPrompt",
    "received_weights",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
