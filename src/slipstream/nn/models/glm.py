"""GLM-4: the first releases (Glm) and those of 2025 (Glm4), which norm the outputs of sublayers too."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_mlp, llama_rules, llama_shape
from slipstream.nn.weights.rules import Rules

_FUSED: dict[str, str | None] = {"model.layers.{n}.mlp.gate_up_proj.{kind}": "layers.{n}.mlp.gate_up.{kind}"}
_NORMS_AFTER: dict[str, str | None] = {
    "model.layers.{n}.post_self_attn_layernorm.weight": "layers.{n}.attention_out_norm.weight",
    "model.layers.{n}.post_mlp_layernorm.weight": "layers.{n}.mlp_out_norm.weight",
}


def glm_shape(info: ModelInfo, norm_after: bool = False) -> DecoderShape:
    """Rope rotates neighbouring numbers of a part of each head."""
    rotary = int(info.head_dim * float(info.rope.factors.get("partial_rotary_factor", 1.0)))
    attention = replace(llama_attention(info), rotary_pairs=rotary, output_bias=False)
    mlp = replace(llama_mlp(info), fused=True, bias=False, down_bias=False)
    return llama_shape(info, attention, mlp, norm_after=norm_after)


def glm4_shape(info: ModelInfo) -> DecoderShape:
    return glm_shape(info, norm_after=True)


def glm_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, _FUSED)


def glm4_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, _FUSED | _NORMS_AFTER)
