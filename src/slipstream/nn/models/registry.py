"""Which family an architecture belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.cache_spec import CacheSpec
from slipstream.config.model_info import ModelInfo
from slipstream.errors import UnsupportedModel
from slipstream.nn.models.decoder import DecoderShape
from slipstream.nn.models.llama import llama_rules, llama_shape
from slipstream.nn.models.qwen import qwen3_shape
from slipstream.nn.weights.rules import Rules


@dataclass(frozen=True, slots=True)
class Family:
    shape: Callable[[ModelInfo], DecoderShape]
    rules: Callable[[DecoderShape], Rules]


FAMILIES = {
    "LlamaForCausalLM": Family(llama_shape, llama_rules),
    "Qwen3ForCausalLM": Family(qwen3_shape, llama_rules),
}


def find_family(info: ModelInfo) -> Family:
    family = FAMILIES.get(info.architecture)
    if family is None:
        raise UnsupportedModel(f"{info.architecture} is not an architecture we run; we run {', '.join(FAMILIES)}")
    return family


def cache_specs(info: ModelInfo, page_size: int, itemsize: int) -> list[CacheSpec]:
    """What each layer asks to have remembered, known before anything is loaded."""
    return find_family(info).shape(info).cache_specs(page_size, itemsize)
