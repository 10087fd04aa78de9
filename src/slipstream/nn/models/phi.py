"""The Phi family: Phi-3 and Phi-4-mini. Fused projections; long contexts by two sets of rope factors."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config.model_info import ModelInfo
from slipstream.nn.models.decoder import DecoderShape
from slipstream.nn.models.llama import llama_rules, mistral_shape
from slipstream.nn.weights.rules import Rules


def phi3_shape(info: ModelInfo) -> DecoderShape:
    """Mistral's, for the window in every layer that some releases have."""
    return replace(mistral_shape(info), fused=True)


def phi3_rules(shape: DecoderShape) -> Rules:
    return llama_rules(
        shape,
        {
            "model.layers.{n}.self_attn.qkv_proj.weight": "layers.{n}.attention.qkv.weight",
            "model.layers.{n}.mlp.gate_up_proj.weight": "layers.{n}.mlp.gate_up.weight",
        },
    )
