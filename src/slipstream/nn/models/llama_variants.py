"""Families that differ from Llama in a fact or two: SmolLM3, Granite, Seed-OSS, Arcee, Apertus, ERNIE-4.5, HunYuan and
EXAONE-4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo
from slipstream.nn.models.decoder_shape import DecoderShape, RopeShape
from slipstream.nn.models.llama import llama_attention, llama_mlp, llama_rules, llama_shape
from slipstream.nn.models.olmo import olmo2_rules
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.shapes import AttentionShape
from slipstream.nn.weights.rules import Rules

PLAIN_MLP: dict[str, str | None] = {"model.layers.{n}.mlp.up_proj.{kind}": "layers.{n}.mlp.up.{kind}"}
"""The one name that an MLP without a gate has of its own."""


def with_rope_in(shape: DecoderShape, has_rope: Sequence[bool]) -> DecoderShape:
    """The same model with positions in some layers only."""
    assert len(has_rope) == len(shape.layers)
    if all(has_rope):
        return shape
    none = RopeShape(RopeInfo(kind="none"), shape.ropes[0].head_dim, switches=False)

    def changed(mixer: AttentionShape, rotates: bool) -> AttentionShape:
        return mixer if rotates else replace(mixer, rope=len(shape.ropes))

    layers = (
        replace(layer, mixers=tuple(changed(mixer, rotates) for mixer in layer.mixers))  # type: ignore[arg-type]
        for layer, rotates in zip(shape.layers, has_rope, strict=True)
    )
    return replace(shape, layers=tuple(layers), ropes=(*shape.ropes, none))


def smollm3_shape(info: ModelInfo) -> DecoderShape:
    """Every fourth layer has no rope."""
    extra, interval = info.extra, int(info.extra["no_rope_layer_interval"])
    has_rope = extra.get("no_rope_layers")
    if has_rope is None:
        has_rope = [(layer + 1) % interval != 0 for layer in range(info.num_layers)]
    if len(has_rope) < info.num_layers:
        raise BadCheckpoint(f"no_rope_layers of config.json has {len(has_rope)} entries for {info.num_layers} layers")
    windows: tuple[int, ...] = ()
    if extra.get("use_sliding_window") and extra.get("sliding_window") is not None:
        windows = layer_windows(info, lambda layer: not has_rope[layer])
    return with_rope_in(llama_shape(info, windows=windows), [bool(has) for has in has_rope[: info.num_layers]])


def granite_shape(info: ModelInfo) -> DecoderShape:
    """Fixed factors scale embeddings, attention scores, residuals and logits."""
    factor = {name: float(info.extra.get(f"{name}_multiplier", 1.0)) for name in ("embedding", "attention", "residual")}
    shape = llama_shape(info, replace(llama_attention(info), scale=factor["attention"]))
    return replace(
        shape,
        layers=tuple(replace(layer, branch_scale=factor["residual"]) for layer in shape.layers),
        embedding_scale=factor["embedding"],
        logit_scale=1.0 / float(info.extra.get("logits_scaling", 1.0)),
    )


def seed_oss_shape(info: ModelInfo) -> DecoderShape:
    """The output projection has a bias of its own switch."""
    output_bias = bool(info.extra.get("attention_out_bias", False))
    return llama_shape(info, replace(llama_attention(info), output_bias=output_bias))


def arcee_shape(info: ModelInfo) -> DecoderShape:
    """An MLP without a gate, of squared relu."""
    return llama_shape(info, mlp=replace(llama_mlp(info), gated=False))


def arcee_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, PLAIN_MLP)


def apertus_shape(info: ModelInfo) -> DecoderShape:
    """An MLP without a gate, of xIELU; queries and keys are normed."""
    mlp = replace(llama_mlp(info), gated=False, bias=False, down_bias=False)
    return llama_shape(info, replace(llama_attention(info), qk_norm="heads"), mlp)


def apertus_rules(shape: DecoderShape) -> Rules:
    return llama_rules(
        shape,
        {
            **PLAIN_MLP,
            "model.layers.{n}.attention_layernorm.weight": "layers.{n}.attention_norm.weight",
            "model.layers.{n}.feedforward_layernorm.weight": "layers.{n}.mlp_norm.weight",
            "model.layers.{n}.mlp.act_fn.alpha_{which}": "layers.{n}.mlp.activation.alpha_{which}",
            # buffers of xIELU with the values of its definition
            "model.layers.{n}.mlp.act_fn.beta": None,
            "model.layers.{n}.mlp.act_fn.eps": None,
        },
    )


def ernie_shape(info: ModelInfo) -> DecoderShape:
    """Rope rotates neighbouring numbers; one switch turns all biases on."""
    bias = bool(info.extra.get("use_bias", False))
    attention = replace(llama_attention(info), rotary_pairs=info.head_dim, qkv_bias=bias, output_bias=bias)
    return llama_shape(info, attention, replace(llama_mlp(info), bias=bias, down_bias=bias))


def hunyuan_shape(info: ModelInfo) -> DecoderShape:
    """Queries and keys are normed after rope. The base of a dynamic rope with alpha grows once, by alpha."""
    rope = info.rope
    if rope.kind == "dynamic" and (alpha := rope.factors.get("alpha")):
        theta = rope.theta * float(alpha) ** (info.head_dim / (info.head_dim - 2))
        info = msgspec.structs.replace(info, rope=RopeInfo(theta))
    return llama_shape(info, replace(llama_attention(info), qk_norm="heads", norm_after_rope=True))


def hunyuan_rules(shape: DecoderShape) -> Rules:
    norm, ours = "model.layers.{n}.self_attn.", "layers.{n}.attention.norm."
    names = {f"{norm}{name}_layernorm.weight": f"{ours}{name[0]}.weight" for name in ("query", "key")}
    return llama_rules(shape, names)


def exaone4_shape(info: ModelInfo) -> DecoderShape:
    """Norms as OLMo-2's, of queries and keys per head. If some layers have a window, the others have no rope."""
    extra = info.extra
    attention = replace(llama_attention(info), qk_norm="heads", qkv_bias=False, output_bias=False)
    window = extra.get("sliding_window")
    pattern = extra.get("sliding_window_pattern")
    if isinstance(pattern, str):  # L: a window, G: all positions; the last layer sees all
        kinds = [pattern[layer % len(pattern)] == "L" for layer in range(info.num_layers - 1)] + [False]
    elif isinstance(pattern, int) and pattern > 0:
        kinds = [(layer + 1) % pattern != 0 for layer in range(info.num_layers)]
    else:
        kinds = [False] * info.num_layers
    windows = layer_windows(info, lambda layer: kinds[layer]) if window is not None else ()
    shape = llama_shape(info, attention, windows=windows, norm_before=False, norm_after=True)
    if window is None:
        return shape
    return with_rope_in(shape, [mixer.window > 0 for mixer in shape.attentions])


exaone4_rules = olmo2_rules
