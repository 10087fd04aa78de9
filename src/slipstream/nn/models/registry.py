"""Which family an architecture belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.cache_spec import CacheSpec
from slipstream.config.model_info import ModelInfo
from slipstream.errors import UnsupportedModel
from slipstream.nn.models.decoder import DecoderShape
from slipstream.nn.models.gemma import gemma2_shape, gemma3_shape, gemma_rules, gemma_text_rules
from slipstream.nn.models.llama import llama_rules, llama_shape, mistral_shape
from slipstream.nn.models.olmo import olmo2_rules, olmo2_shape
from slipstream.nn.models.phi import phi3_rules, phi3_shape
from slipstream.nn.models.qwen import qwen2_shape, qwen3_shape
from slipstream.nn.weights.rules import Rules


@dataclass(frozen=True, slots=True)
class Family:
    shape: Callable[[ModelInfo], DecoderShape]
    rules: Callable[[DecoderShape], Rules]


FAMILIES = {
    "LlamaForCausalLM": Family(llama_shape, llama_rules),
    "MistralForCausalLM": Family(mistral_shape, llama_rules),
    "Qwen2ForCausalLM": Family(qwen2_shape, llama_rules),
    "Qwen3ForCausalLM": Family(qwen3_shape, llama_rules),
    "Gemma2ForCausalLM": Family(gemma2_shape, gemma_rules),
    "Gemma3ForCausalLM": Family(gemma3_shape, gemma_rules),
    "Gemma3ForConditionalGeneration": Family(gemma3_shape, gemma_text_rules),
    "Phi3ForCausalLM": Family(phi3_shape, phi3_rules),
    "Olmo2ForCausalLM": Family(olmo2_shape, olmo2_rules),
}


def find_family(info: ModelInfo) -> Family:
    family = FAMILIES.get(info.architecture)
    if family is None:
        raise UnsupportedModel(f"{info.architecture} is not an architecture we run; we run {', '.join(FAMILIES)}")
    return family


def cache_specs(info: ModelInfo, page_size: int, itemsize: int) -> list[CacheSpec]:
    """What each layer asks to have remembered, known before anything is loaded."""
    return find_family(info).shape(info).cache_specs(page_size, itemsize)
