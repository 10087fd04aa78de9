"""OLMo-2 and 3: norms after attention and MLP, none before; queries and keys normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_rules, llama_shape, with_local_rope
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.weights.rules import Rules


def olmo2_shape(info: ModelInfo) -> DecoderShape:
    attention = replace(llama_attention(info), qk_norm="whole")
    return llama_shape(info, attention, norm_before=False, norm_after=True)


def olmo3_shape(info: ModelInfo) -> DecoderShape:
    """Three of four layers have a window, and a rope of their own that is not scaled."""
    attention = replace(llama_attention(info), qk_norm="whole")
    windows = layer_windows(info, lambda layer: (layer + 1) % 4 != 0)
    return with_local_rope(llama_shape(info, attention, windows=windows, norm_before=False, norm_after=True), info)


def olmo2_rules(shape: DecoderShape) -> Rules:
    return llama_rules(
        shape,
        {
            "model.layers.{n}.post_attention_layernorm.weight": "layers.{n}.attention_out_norm.weight",
            "model.layers.{n}.post_feedforward_layernorm.weight": "layers.{n}.mlp_out_norm.weight",
        },
    )
