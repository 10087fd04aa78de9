"""LFM2 and LFM2-MoE: short convolutions, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.families.llama import llama_attention, llama_rules, llama_shape
from slipstream.nn.families.mamba import read_conv_width
from slipstream.nn.families.moe import expert_shape, needed_number, sigmoid_rule, with_feeds
from slipstream.nn.shapes import MlpShape
from slipstream.nn.ssm_shapes import ShortConvShape
from slipstream.nn.weights.source import Rules

CONV, FULL = "conv", "full_attention"


def lfm2_shape(info: ModelInfo) -> DecoderShape:
    return _shape(info, MlpShape(size=_ffn_size(info), activation="silu"))


def lfm2_moe_shape(info: ModelInfo) -> DecoderShape:
    """Layers before `num_dense_layers` are dense."""
    extra = info.extra
    rule = replace(sigmoid_rule(info), epsilon=1e-6)
    experts = expert_shape(info, needed_number(info, "moe_intermediate_size"), rule)
    feed = replace(experts, correction_bias=bool(extra.get("use_expert_bias", True)))
    dense, num_dense = MlpShape(size=info.ffn_size, activation="silu"), int(extra.get("num_dense_layers", 2))
    return with_feeds(_shape(info, dense), lambda layer: dense if layer < num_dense else feed)


def _shape(info: ModelInfo, feed: MlpShape) -> DecoderShape:
    conv = ShortConvShape(
        size=info.hidden_size,
        conv_width=read_conv_width(info, "conv_L_cache"),
        bias=bool(info.extra.get("conv_bias", False)),
    )
    attention = replace(llama_attention(info), qk_norm="heads", qkv_bias=False, output_bias=False)
    shape = llama_shape(info, attention, feed)
    layers = (
        replace(layer, mixers=(conv,) if kind == CONV else layer.mixers)
        for layer, kind in zip(shape.layers, _layer_kinds(info), strict=True)
    )
    return replace(shape, layers=tuple(layers))


def _ffn_size(info: ModelInfo) -> int:
    """Two thirds of what the config says, times a factor, rounded up to a multiple."""
    extra, size = info.extra, int(info.extra.get("block_ff_dim") or info.ffn_size)
    if not extra.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor = extra.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = int(extra.get("block_multiple_of", 256))
    return -(-int(float(factor) * size) // multiple) * multiple


def _layer_kinds(info: ModelInfo) -> list[str]:
    kinds = info.extra.get("layer_types")
    if kinds is None:
        attending = info.extra.get("full_attn_idxs")
        layers = range(info.num_layers)
        return [FULL if attending is None or layer in attending else CONV for layer in layers]
    if not isinstance(kinds, list) or len(kinds) != info.num_layers or not {*kinds} <= {CONV, FULL}:
        raise BadCheckpoint(
            f"layer_types of config.json is {kinds!r}; it must say {CONV} or {FULL} for each of "
            f"{info.num_layers} layers"
        )
    return kinds


def lfm2_rules(shape: DecoderShape) -> Rules:
    layer = "model.layers.{n}"
    names: dict[str, str | None] = {
        f"model.layers.{number}.operator_norm.weight": f"layers.{number}.{each.mixers[0].name}_norm.weight"
        for number, each in enumerate(shape.layers)
    }
    names |= {
        "model.embedding_norm.weight": "norm.weight",
        f"{layer}.ffn_norm.weight": "layers.{n}.mlp_norm.weight",
        f"{layer}.conv.conv.{{kind}}": "layers.{n}.conv.conv.{kind}",
        f"{layer}.conv.in_proj.{{kind}}": "layers.{n}.conv.input.{kind}",
        f"{layer}.conv.out_proj.{{kind}}": "layers.{n}.conv.output.{kind}",
        f"{layer}.self_attn.out_proj.{{kind}}": "layers.{n}.attention.output.{kind}",
        f"{layer}.self_attn.{{part}}_layernorm.weight": "layers.{n}.attention.norm.{part}.weight",
        f"{layer}.feed_forward.w1.{{kind}}": "layers.{n}.mlp.gate_up.gate.{kind}",
        f"{layer}.feed_forward.w3.{{kind}}": "layers.{n}.mlp.gate_up.up.{kind}",
        f"{layer}.feed_forward.w2.{{kind}}": "layers.{n}.mlp.down.{kind}",
        f"{layer}.feed_forward.gate.weight": "layers.{n}.mlp.router.weight",
        f"{layer}.feed_forward.expert_bias": "layers.{n}.mlp.correction_bias",
    }
    expert = f"{layer}.feed_forward.experts.{{e}}"
    for stored, part in {"w1": "gate", "w2": "down", "w3": "up"}.items():
        names[f"{expert}.{stored}.{{kind}}"] = f"layers.{{n}}.mlp.experts.{{e}}.{part}.{{kind}}"
    names[f"{expert}.{{part}}_proj.{{kind}}"] = "layers.{n}.mlp.experts.{e}.{part}.{kind}"
    return llama_rules(shape, names)
