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
    from slipstream.async_llm import AsyncLLM as AsyncLLM
    from slipstream.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from slipstream.config.vllm_args import PoolerConfig as PoolerConfig
    from slipstream.frontend.async_engine import AsyncEngine as AsyncEngine
    from slipstream.frontend.beam_search import BeamSearchParams as BeamSearchParams
    from slipstream.frontend.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from slipstream.frontend.engine_args import EngineArgs as EngineArgs
    from slipstream.frontend.logprobs import FlatLogprobs as FlatLogprobs
    from slipstream.frontend.pooling.results import ClassificationOutput as ClassificationOutput
    from slipstream.frontend.pooling.results import ClassificationRequestOutput as ClassificationRequestOutput
    from slipstream.frontend.pooling.results import EmbeddingOutput as EmbeddingOutput
    from slipstream.frontend.pooling.results import EmbeddingRequestOutput as EmbeddingRequestOutput
    from slipstream.frontend.pooling.results import PoolingOutput as PoolingOutput
    from slipstream.frontend.pooling.results import PoolingRequestOutput as PoolingRequestOutput
    from slipstream.frontend.pooling.results import ScoringOutput as ScoringOutput
    from slipstream.frontend.pooling.results import ScoringRequestOutput as ScoringRequestOutput
    from slipstream.frontend.results import CompletionOutput as CompletionOutput
    from slipstream.frontend.results import Logprob as Logprob
    from slipstream.frontend.results import RequestOutput as RequestOutput
    from slipstream.frontend.stat_loggers import StatLoggerBase as StatLoggerBase
    from slipstream.frontend.vllm_names import EmbedsPrompt as EmbedsPrompt
    from slipstream.frontend.vllm_names import PromptType as PromptType
    from slipstream.frontend.vllm_names import TextPrompt as TextPrompt
    from slipstream.frontend.vllm_names import TokensPrompt as TokensPrompt
    from slipstream.llm import LLM as LLM
    from slipstream.llm_engine import LLMEngine as LLMEngine
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
    "AsyncEngine": "slipstream.frontend.async_engine",
    "AsyncEngineArgs": "slipstream.frontend.engine_args",
    "AsyncLLM": "slipstream.async_llm",
    "AsyncLLMEngine": "slipstream.async_llm",
    "BatchUpdate": "slipstream.params.processors",
    "BeamSearchParams": "slipstream.frontend.beam_search",
    "ClassificationOutput": "slipstream.frontend.pooling.results",
    "ClassificationRequestOutput": "slipstream.frontend.pooling.results",
    "CompletionOutput": "slipstream.frontend.results",
    "EmbeddingOutput": "slipstream.frontend.pooling.results",
    "EmbeddingRequestOutput": "slipstream.frontend.pooling.results",
    "EngineArgs": "slipstream.frontend.engine_args",
    "FlatLogprobs": "slipstream.frontend.logprobs",
    "LLM": "slipstream.llm",
    "LLMEngine": "slipstream.llm_engine",
    "LogitsProcessor": "slipstream.params.processors",
    "Logprob": "slipstream.frontend.results",
    "MoveDirectionality": "slipstream.params.processors",
    "PoolerConfig": "slipstream.config.vllm_args",
    "PoolingOutput": "slipstream.frontend.pooling.results",
    "PoolingParams": "slipstream.params.pooling",
    "PoolingRequestOutput": "slipstream.frontend.pooling.results",
    "PromptType": "slipstream.frontend.vllm_names",
    "RequestOutput": "slipstream.frontend.results",
    "RequestOutputKind": "slipstream.params.sampling",
    "LoRARequest": "slipstream.params.lora",
    "SamplingParams": "slipstream.params.sampling",
    "ScoringOutput": "slipstream.frontend.pooling.results",
    "ScoringRequestOutput": "slipstream.frontend.pooling.results",
    "StatLoggerBase": "slipstream.frontend.stat_loggers",
    "StructuredOutputsParams": "slipstream.params.structured",
    "TextPrompt": "slipstream.frontend.vllm_names",
    "EmbedsPrompt": "slipstream.frontend.vllm_names",
    "TokensPrompt": "slipstream.frontend.vllm_names",
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
