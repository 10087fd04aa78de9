"""The Phi family: Phi-3 and Phi-4-mini. Projections are stored fused; LongRoPE has two sets of factors."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_mlp, llama_rules, llama_shape, mistral_windows
from slipstream.nn.weights.rules import Rules


def phi3_shape(info: ModelInfo) -> DecoderShape:
    """Some releases have a window in every layer, as Mistral's."""
    attention, mlp = replace(llama_attention(info), fused=True), replace(llama_mlp(info), fused=True)
    return llama_shape(info, attention, mlp, mistral_windows(info))


def phi3_rules(shape: DecoderShape) -> Rules:
    return llama_rules(
        shape,
        {
            "model.layers.{n}.self_attn.qkv_proj.{kind}": "layers.{n}.attention.qkv.{kind}",
            "model.layers.{n}.mlp.gate_up_proj.{kind}": "layers.{n}.mlp.gate_up.{kind}",
        },
    )
