"""OLMo-2: norms after attention and feed-forward, none before; queries and keys normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_rules, llama_shape
from slipstream.nn.weights.rules import Rules


def olmo2_shape(info: ModelInfo) -> DecoderShape:
    attention = replace(llama_attention(info), qk_norm="whole")
    return llama_shape(info, attention, norm_before=False, norm_after=True)


def olmo2_rules(shape: DecoderShape) -> Rules:
    return llama_rules(
        shape,
        {
            "model.layers.{n}.post_attention_layernorm.weight": "layers.{n}.attention_out_norm.weight",
            "model.layers.{n}.post_feedforward_layernorm.weight": "layers.{n}.mlp_out_norm.weight",
        },
    )
