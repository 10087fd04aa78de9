"""Qwen3-Next and the text models of Qwen3.5, dense and with experts.

Most layers mix tokens by a gated delta rule, every fourth one by gated attention with a rope over part of each head.
Norms are stored as weight - 1. Qwen3-Next stores the inputs of the delta rule interleaved by key head, Qwen3.5 one part
after another. Weights for pictures and for drafting tokens (MTP) are left out.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.families.llama import llama_attention, llama_mlp, llama_rules, llama_shape
from slipstream.nn.families.moe import expert_names, needed_number, qwen_shared_feeds
from slipstream.nn.shapes import DeltaShape, NormShape
from slipstream.nn.weights.source import Rules

LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_next_shape(info: ModelInfo) -> DecoderShape:
    return _shape(info, interleaved=True)


def qwen3_5_shape(info: ModelInfo) -> DecoderShape:
    return _shape(info, interleaved=False)


def _shape(info: ModelInfo, interleaved: bool) -> DecoderShape:
    attention = replace(llama_attention(info), qk_norm="heads", gated=True)
    delta = _delta_shape(info, interleaved)
    dense = llama_mlp(info)
    feed_of = qwen_shared_feeds(info) if info.num_experts else lambda layer: dense
    shape = llama_shape(info, attention, norm=NormShape(eps=info.norm_eps, offset=1.0))
    layers = (
        replace(layer, mixers=(delta,) if kind == LINEAR else layer.mixers, feed=feed_of(number))
        for number, (layer, kind) in enumerate(zip(shape.layers, _layer_kinds(info), strict=True))
    )
    return replace(shape, layers=tuple(layers))


def _delta_shape(info: ModelInfo, interleaved: bool) -> DeltaShape:
    shape = DeltaShape(
        num_key_heads=needed_number(info, "linear_num_key_heads"),
        num_value_heads=needed_number(info, "linear_num_value_heads"),
        key_dim=needed_number(info, "linear_key_head_dim"),
        value_dim=needed_number(info, "linear_value_head_dim"),
        conv_width=needed_number(info, "linear_conv_kernel_dim"),
        interleaved=interleaved,
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise BadCheckpoint(
            f"config.json has {shape.num_value_heads} value heads for {shape.num_key_heads} key heads of linear "
            "attention; the first must be a multiple of the second"
        )
    if shape.conv_width < 2:
        raise UnsupportedModel(f"{info.architecture} has a convolution of {shape.conv_width} token; 2 or more are run")
    if info.activation != "silu":
        raise UnsupportedModel(f"{info.architecture} has {info.activation} after its convolution; only silu is run")
    return shape


def _layer_kinds(info: ModelInfo) -> list[str]:
    kinds = info.extra.get("layer_types")
    if kinds is None:
        interval = needed_number(info, "full_attention_interval")
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(info.num_layers)]
    if not isinstance(kinds, list) or len(kinds) != info.num_layers or not {*kinds} <= {LINEAR, FULL}:
        raise BadCheckpoint(
            f"layer_types of config.json is {kinds!r}; it must say {LINEAR} or {FULL} for each of {info.num_layers} "
            "layers"
        )
    return kinds


def qwen3_next_rules(shape: DecoderShape) -> Rules:
    return _rules(shape, ("model", ""))


def qwen3_5_rules(shape: DecoderShape) -> Rules:
    """The text model alone, or inside a multimodal model."""
    return _rules(shape, ("model", "model.language_model", "language_model.model", ""))


def _rules(shape: DecoderShape, roots: tuple[str, ...]) -> Rules:
    left_out = dict.fromkeys(("mtp.*", "model.mtp.*", "visual.*", "model.visual.*"))
    theirs, ours = "model.layers.{n}.linear_attn", "layers.{n}.delta_net"
    names: dict[str, str | None] = {
        f"model.layers.{number}.input_layernorm.weight": f"layers.{number}.delta_net_norm.weight"
        for number, layer in enumerate(shape.layers)
        if isinstance(layer.mixers[0], DeltaShape)
    }
    names |= {
        f"{theirs}.in_proj_{{part}}.{{kind}}": f"{ours}.input.{{part}}.{{kind}}",
        f"{theirs}.out_proj.{{kind}}": f"{ours}.output.{{kind}}",
        f"{theirs}.conv1d.weight": f"{ours}.conv.weight",
        f"{theirs}.A_log": f"{ours}.a_log",
        f"{theirs}.dt_bias": f"{ours}.dt_bias",
        f"{theirs}.norm.weight": f"{ours}.norm.weight",
    }
    head = {"language_model.lm_head.{kind}": None if shape.tied or shape.headless else "head.{kind}"}
    return Rules({**left_out, **head}) | llama_rules(shape, names | expert_names(), roots)
