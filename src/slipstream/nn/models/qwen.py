"""The Qwen family: Qwen2, 2.5 and 3, dense. Tensor names are Llama's."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config.model_info import ModelInfo
from slipstream.nn.models.decoder import DecoderShape
from slipstream.nn.models.llama import llama_shape
from slipstream.nn.models.windows import layer_windows


def qwen2_shape(info: ModelInfo) -> DecoderShape:
    """Llama's, with a bias on q, k and v. The upper layers may have a window, where one is switched on."""
    first = info.extra.get("max_window_layers", 28) if info.extra.get("use_sliding_window") else info.num_layers
    windows = layer_windows(info, lambda layer: layer >= first)
    return replace(llama_shape(info), windows=windows, qkv_bias=True, output_bias=False)


def qwen3_shape(info: ModelInfo) -> DecoderShape:
    """Qwen2's with norms on queries and keys instead of the bias."""
    bias = info.attention_bias
    return replace(qwen2_shape(info), qk_norm="heads", qkv_bias=bias, output_bias=bias)
