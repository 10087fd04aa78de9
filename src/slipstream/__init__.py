"""Slipstream: an LLM inference engine in which the host never makes the device wait.

Names are loaded when first used, so that importing the package costs nothing and never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config.pooler_config import PoolerConfig as PoolerConfig
    from slipstream.frontend.async_engine import AsyncEngine as AsyncEngine
    from slipstream.frontend.beam_search import BeamSearchParams as BeamSearchParams
    from slipstream.frontend.results import CompletionOutput as CompletionOutput
    from slipstream.frontend.results import RequestOutput as RequestOutput
    from slipstream.llm import LLM as LLM
    from slipstream.logits_processor import AdapterLogitsProcessor as AdapterLogitsProcessor
    from slipstream.logits_processor import BatchUpdate as BatchUpdate
    from slipstream.logits_processor import LogitsProcessor as LogitsProcessor
    from slipstream.logits_processor import MoveDirectionality as MoveDirectionality
    from slipstream.lora_request import LoRARequest as LoRARequest
    from slipstream.params import RequestOutputKind as RequestOutputKind
    from slipstream.params import SamplingParams as SamplingParams
    from slipstream.pooling_params import PoolingParams as PoolingParams
    from slipstream.structured_params import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "slipstream.llm",
    "AsyncEngine": "slipstream.frontend.async_engine",
    "AdapterLogitsProcessor": "slipstream.logits_processor",
    "BatchUpdate": "slipstream.logits_processor",
    "LogitsProcessor": "slipstream.logits_processor",
    "MoveDirectionality": "slipstream.logits_processor",
    "BeamSearchParams": "slipstream.frontend.beam_search",
    "RequestOutputKind": "slipstream.params",
    "LoRARequest": "slipstream.lora_request",
    "SamplingParams": "slipstream.params",
    "PoolerConfig": "slipstream.config.pooler_config",
    "PoolingParams": "slipstream.pooling_params",
    "StructuredOutputsParams": "slipstream.structured_params",
    "RequestOutput": "slipstream.frontend.results",
    "CompletionOutput": "slipstream.frontend.results",
}

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngine",
    "BatchUpdate",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "LogitsProcessor",
    "MoveDirectionality",
    "PoolerConfig",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
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
