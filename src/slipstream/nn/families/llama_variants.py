"""Families that differ from Llama in a fact or two: SmolLM3, Granite, Seed-OSS, Arcee, Apertus, ERNIE-4.5, HunYuan and
EXAONE-4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo
from slipstream.nn.decoder import DecoderShape, RopeShape
from slipstream.nn.families.llama import (
    layer_windows,
    llama_attention,
    llama_mlp,
    llama_rules,
    llama_shape,
    mistral_shape,
    mistral_windows,
    with_local_rope,
)
from slipstream.nn.shapes import AttentionShape, NormShape, QueryScale
from slipstream.nn.weights.source import Rules

# Mistral and Ministral, alone or as the text part of Mistral 3.


def ministral_shape(info: ModelInfo) -> DecoderShape:
    """Mistral's with a list of the layers that have a window."""
    has_window = info.extra.get("sliding_window") is not None
    attention = replace(llama_attention(info), qkv_bias=False, output_bias=False)
    return llama_shape(info, attention, windows=layer_windows(info, lambda layer: has_window))


def ministral3_shape(info: ModelInfo) -> DecoderShape:
    """Queries grow with their position, beyond the length of the first training."""
    factors = info.rope.factors
    attention = llama_attention(info)
    if (beta := factors.get("llama_4_scaling_beta")) is not None:
        length = int(factors["original_max_position_embeddings"])
        attention = replace(attention, query_scale=QueryScale(float(beta), length))
    return llama_shape(info, attention, windows=mistral_windows(info))


# OLMo-2 and 3: norms after attention and MLP, none before; queries and keys normed over all heads together.


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


# The Phi family: Phi-3 and Phi-4-mini. Projections are stored fused; LongRoPE has two sets of factors.


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


# The Qwen family: Qwen2, 2.5 and 3, dense. Tensor names are Llama's.


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


# Command R (Cohere) and Command A (Cohere2): attention and MLP side by side behind one layer norm, scaled logits.


def cohere_shape(info: ModelInfo, windows: tuple[int, ...] = ()) -> DecoderShape:
    """Rope rotates neighbouring numbers. Larger models norm queries and keys, with weights for each head."""
    attention = replace(llama_attention(info), rotary_pairs=info.head_dim)
    if info.extra.get("use_qk_norm"):
        attention = replace(attention, qk_norm="each")
    norm = NormShape(eps=info.norm_eps, kind="layer")
    shape = llama_shape(info, attention, windows=windows, norm=norm)
    layers = tuple(replace(layer, parallel="one norm") for layer in shape.layers)
    return replace(shape, layers=layers, logit_scale=float(info.extra["logit_scale"]))


def cohere2_shape(info: ModelInfo) -> DecoderShape:
    """Layers with a window have rope; every fourth layer sees all positions and has none."""
    pattern = int(info.extra.get("sliding_window_pattern") or 4)
    shape = cohere_shape(info, layer_windows(info, lambda layer: (layer + 1) % pattern != 0))
    return with_rope_in(shape, [mixer.window > 0 for mixer in shape.attentions])


# GLM-4: the first releases (Glm) and those of 2025 (Glm4), which norm the outputs of sublayers too.

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


# The text part of models that see pictures.

_TEXT_SHAPES = {
    "mistral": mistral_shape, "ministral": ministral_shape, "ministral3": ministral3_shape, "llama": llama_shape,
    "qwen2": qwen2_shape, "qwen3": qwen3_shape,
}  # fmt: skip
_USUAL_TEXT = {
    "mistral3": "mistral",
    "llava": "llama",
    "idefics3": "llama",
    "smolvlm": "llama",
    "internvl": "qwen2",
    "llava_onevision": "qwen2",
}


def nested_text_shape(info: ModelInfo) -> DecoderShape:
    """The text part of a model whose config says which of these it is, or leaves the usual one out."""
    kind = str(info.extra.get("model_type"))
    kind = _USUAL_TEXT.get(kind, kind)
    if kind not in _TEXT_SHAPES:
        raise UnsupportedModel(f"{info.architecture} has a text part of type {kind}; we run {', '.join(_TEXT_SHAPES)}")
    return _TEXT_SHAPES[kind](info)


_PARTS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")
_ROOTS = ("model.language_model", "language_model.model", "model.text_model", "model", "")


def vision_text_rules(shape: DecoderShape, others: Mapping[str, str | None] | None = None) -> Rules:
    """Rules of the text part, in the names of older and newer releases; tensors for images are left out."""
    parts = (*(f"{part}.*" for part in _PARTS), "image_newline")
    pictures = {f"{root}{part}": None for root in ("", "model.") for part in parts}
    head = {"language_model.lm_head.{kind}": None if shape.tied or shape.headless else "head.{kind}"}
    return Rules(pictures | head) | llama_rules(shape, others, _ROOTS)
