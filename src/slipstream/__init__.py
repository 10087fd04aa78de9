"""Slipstream: an LLM inference engine in which the host never makes the device wait.

Names are loaded when first used, so that importing the package costs nothing and never loads torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from slipstream.base import __version__

# Torch's wheels for ARM have an allocator of their own (mimalloc), which reads this when torch is loaded: milliseconds
# until freed memory goes back to the system. With its default, 10, every step faults in its pages again.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from slipstream.api.async_llm import AsyncLLM as AsyncLLM
    from slipstream.api.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from slipstream.api.async_llm import StatLoggerBase as StatLoggerBase
    from slipstream.api.llm import LLM as LLM
    from slipstream.api.llm import LLMEngine as LLMEngine
    from slipstream.api.vllm import AsyncEngineArgs as AsyncEngineArgs
    from slipstream.api.vllm import EmbedsPrompt as EmbedsPrompt
    from slipstream.api.vllm import EngineArgs as EngineArgs
    from slipstream.api.vllm import PromptType as PromptType
    from slipstream.api.vllm import TextPrompt as TextPrompt
    from slipstream.api.vllm import TokensPrompt as TokensPrompt
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
    from slipstream.nn.update import received_weights as received_weights
    from slipstream.params.lora import LoRARequest as LoRARequest
    from slipstream.params.pooling import PoolingParams as PoolingParams
    from slipstream.params.processors import AdapterLogitsProcessor as AdapterLogitsProcessor
    from slipstream.params.processors import BatchUpdate as BatchUpdate
    from slipstream.params.processors import LogitsProcessor as LogitsProcessor
    from slipstream.params.processors import MoveDirectionality as MoveDirectionality
    from slipstream.params.sampling import RepetitionDetectionParams as RepetitionDetectionParams
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
    "PromptType": "slipstream.api.vllm",
    "RequestOutput": "slipstream.front.results",
    "RepetitionDetectionParams": "slipstream.params.sampling",
    "RequestOutputKind": "slipstream.params.sampling",
    "LoRARequest": "slipstream.params.lora",
    "SamplingParams": "slipstream.params.sampling",
    "ScoringOutput": "slipstream.front.pooling_results",
    "ScoringRequestOutput": "slipstream.front.pooling_results",
    "StatLoggerBase": "slipstream.api.async_llm",
    "StructuredOutputsParams": "slipstream.params.structured",
    "TextPrompt": "slipstream.api.vllm",
    "EmbedsPrompt": "slipstream.api.vllm",
    "TokensPrompt": "slipstream.api.vllm",
    "received_weights": "slipstream.nn.update",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# vLLM's modules, for scripts that import names from them: `from slipstream.sampling_params import SamplingParams`.

VLLM_MODULES = {
    "beam_search": ("BeamSearchOutput", "BeamSearchSequence"),
    "config": ("PoolerConfig",),
    "engine.arg_utils": ("AsyncEngineArgs", "EngineArgs"),
    "engine.async_llm_engine": ("AsyncLLMEngine",),
    "engine.llm_engine": ("LLMEngine",),
    "entrypoints.llm": ("LLM",),
    "exceptions": ("VLLMValidationError",),
    "inputs": ("EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"),
    "inputs.data": ("EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"),
    "logprobs": ("FlatLogprobs", "Logprob"),
    "lora.request": ("LoRARequest",),
    "outputs": (
        "ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput",
        "EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput", "RequestOutput", "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "pooling_params": ("PoolingParams",),
    "sampling_params": (
        "BeamSearchParams", "RepetitionDetectionParams", "RequestOutputKind", "SamplingParams",
        "StructuredOutputsParams",
    ),
    "sequence": ("Logprob",),
    "utils": ("FlexibleArgumentParser",),
    "utils.argparse_utils": ("FlexibleArgumentParser",),
    "v1.engine.async_llm": ("AsyncLLM",),
    "v1.engine.exceptions": ("EngineDeadError",),
    "v1.engine.llm_engine": ("LLMEngine",),
    "v1.metrics.loggers": ("StatLoggerBase",),
    "v1.metrics.reader": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "v1.sample.logits_processor": (
        "AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality", "process_dict_updates",
    ),
}  # fmt: skip
"""Names by module. Those that `_HOMES` has not are here:"""
_ONLY_IN_MODULES = {
    "BeamSearchOutput": ("slipstream.front.beam_search", "BeamSearchOutput"),
    "BeamSearchSequence": ("slipstream.front.beam_search", "BeamSearchSequence"),
    "EngineDeadError": ("slipstream.base.errors", "EngineDead"),
    "FlexibleArgumentParser": ("argparse", "ArgumentParser"),
    "VLLMValidationError": ("slipstream.base.errors", "UserError"),
    "process_dict_updates": ("slipstream.params.processors", "process_dict_updates"),
    **{name: ("slipstream.metrics.prometheus", name) for name in VLLM_MODULES["v1.metrics.reader"]},
}


class _VllmModules:
    """Finds modules of VLLM_MODULES that are no files here. Their names are loaded when first used."""

    def find_spec(self, name: str, *more: object) -> ModuleSpec | None:
        from importlib.machinery import ModuleSpec

        short = name.removeprefix("slipstream.")
        is_package = any(each.startswith(f"{short}.") for each in VLLM_MODULES)
        is_ours = short != name and (is_package or short in VLLM_MODULES)
        return ModuleSpec(name, self, is_package=is_package) if is_ours else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # a plain one

    def exec_module(self, module: ModuleType) -> None:
        names = VLLM_MODULES.get(module.__name__.removeprefix("slipstream."), ())

        def find(name: str) -> Any:
            if name == "GuidedDecodingParams":  # an ImportError, since `from ... import` hides an AttributeError's text
                raise ImportError(f"vLLM has no {name} since 0.12; use StructuredOutputsParams", name=name)
            if name not in names:
                known = ", ".join(names) or "no names"
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}; it has {known}")
            home, own = _ONLY_IN_MODULES.get(name) or (_HOMES[name], name)
            return getattr(importlib.import_module(home), own)

        module.__doc__ = "Names of vLLM's module."
        vars(module).update(__all__=names, __getattr__=find, __dir__=lambda: list(names))


sys.meta_path.append(_VllmModules())  # asked last, about modules that nothing else has
