"""Mistral and Ministral, alone or as the text part of Mistral 3."""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_shape, mistral_shape, mistral_windows
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.shapes import QueryScale


def ministral_shape(info: ModelInfo) -> DecoderShape:
    """Mistral's with a list of the layers that have a window."""
    has_window = info.extra.get("sliding_window") is not None
    attention = replace(llama_attention(info), qkv_bias=False, output_bias=False)
    return llama_shape(info, attention, windows=layer_windows(info, lambda layer: has_window))


def ministral3_shape(info: ModelInfo) -> DecoderShape:
    """Queries grow with their position, beyond the length of the first training."""
    factors = info.rope.factors
    attention = llama_attention(info)
    if (beta := factors.get("llama_4_scaling_beta")) is not None:
        length = int(factors["original_max_position_embeddings"])
        attention = replace(attention, query_scale=QueryScale(float(beta), length))
    return llama_shape(info, attention, windows=mistral_windows(info))


_TEXT_SHAPES = {"mistral": mistral_shape, "ministral": ministral_shape, "ministral3": ministral3_shape}


def mistral3_text_shape(info: ModelInfo) -> DecoderShape:
    """The text part of Mistral 3, whose config says which of these it is."""
    kind = info.extra.get("model_type")
    kind = "mistral" if kind == "mistral3" else kind  # its text_config leaves the usual one out
    if kind not in _TEXT_SHAPES:
        raise UnsupportedModel(f"{info.architecture} has a text part of type {kind}; we run {', '.join(_TEXT_SHAPES)}")
    return _TEXT_SHAPES[kind](info)
