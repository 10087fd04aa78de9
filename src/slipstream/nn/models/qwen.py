"""The Qwen family: Qwen2, 2.5 and 3, dense. Tensor names are Llama's."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_shape
from slipstream.nn.models.windows import layer_windows


def qwen2_shape(info: ModelInfo) -> DecoderShape:
    """Llama's with a bias on q, k and v."""
    attention = replace(llama_attention(info), qkv_bias=True, output_bias=False)
    return llama_shape(info, attention, windows=_windows(info))


def qwen3_shape(info: ModelInfo) -> DecoderShape:
    """Qwen2's with norms of queries and keys instead of the bias."""
    return llama_shape(info, replace(llama_attention(info), qk_norm="heads"), windows=_windows(info))


def _windows(info: ModelInfo) -> tuple[int, ...]:
    """The upper layers may have a window, if the config turns it on."""
    first = info.extra.get("max_window_layers", 28) if info.extra.get("use_sliding_window") else info.num_layers
    return layer_windows(info, lambda layer: layer >= first)
