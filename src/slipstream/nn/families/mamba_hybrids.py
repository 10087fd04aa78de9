"""Hybrids of Mamba layers and attention: Granite 4, Bamba, Falcon-H1 and Jamba."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo
from slipstream.nn.decoder import DecoderShape, RopeShape
from slipstream.nn.families.llama import llama_attention, llama_mlp, llama_rules, llama_shape
from slipstream.nn.families.llama_variants import vision_text_rules
from slipstream.nn.families.mamba import (
    FULL,
    MAMBA2_FIELDS,
    RECURRENT,
    check_activation,
    mamba_names,
    read_conv_width,
    read_kinds,
    read_mamba2,
    read_rank,
)
from slipstream.nn.families.moe import (
    expert_names,
    expert_shape,
    needed_number,
    qwen_shared_feeds,
    sigmoid_rule,
    with_feeds,
)
from slipstream.nn.shapes import (
    AttentionShape,
    DeltaShape,
    ExpertShape,
    FeedShape,
    LayerShape,
    MixerShape,
    MlpShape,
    NormShape,
)
from slipstream.nn.ssm_shapes import Mamba1Shape, Mamba2Shape, ShortConvShape
from slipstream.nn.weights.source import Rules
from slipstream.ops.gemm.moe.reference import RouterRule

NO_ROPE = RopeInfo(kind="none")


def granite_hybrid_shape(info: ModelInfo) -> DecoderShape:
    """Granite 4: experts beside a shared MLP, or the MLP alone; mostly without rope."""
    extra = info.extra
    shared = replace(llama_mlp(info), size=needed_number(info, "shared_intermediate_size"), fused=True, bias=False)
    feed: FeedShape = replace(shared, down_bias=False)
    if info.num_experts:
        rule = RouterRule(needed_number(info, "num_experts_per_tok"))
        feed = replace(expert_shape(info, info.ffn_size, rule), shared=replace(shared, down_bias=False))
    attention = replace(llama_attention(info), scale=float(extra.get("attention_multiplier", 1.0)))
    kinds = extra.get("layer_types") or extra.get("layers_block_type") or [RECURRENT] * info.num_layers
    kinds = read_kinds(info, kinds)
    shape = _hybrid(info, attention, kinds, _granite_mixer(info), [feed] * info.num_layers)
    position = extra.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise UnsupportedModel(f"{info.architecture} has positions of kind {position}; rope or none is run")
    scale = float(extra.get("residual_multiplier", 1.0))
    return replace(
        shape if position == "rope" else _without_rope(shape, info),
        layers=tuple(replace(layer, branch_scale=scale) for layer in shape.layers),
        embedding_scale=float(extra.get("embedding_multiplier", 1.0)),
        logit_scale=1.0 / float(extra.get("logits_scaling", 1.0)),
    )


def bamba_shape(info: ModelInfo) -> DecoderShape:
    attending = set(info.extra.get("attn_layer_indices") or ())
    kinds = [FULL if layer in attending else "" for layer in range(info.num_layers)]
    return _hybrid(info, llama_attention(info), kinds, _granite_mixer(info), [llama_mlp(info)] * info.num_layers)


def _granite_mixer(info: ModelInfo) -> Mamba2Shape:
    check_activation(info, info.activation)
    size = int(info.extra.get("mamba_expand", 2)) * info.hidden_size
    bias = bool(info.extra.get("mamba_proj_bias", False))
    mixer = read_mamba2(info, MAMBA2_FIELDS, size)
    return replace(mixer, conv_bias=bool(info.extra.get("mamba_conv_bias", True)), input_bias=bias, output_bias=bias)


def falcon_h1_shape(info: ModelInfo) -> DecoderShape:
    """Every layer has attention and Mamba-2 side by side. Fixed factors scale what they read and write.

    A factor of the attention's input scales queries, keys and values: the first two enter the scale of scores, the last
    one the output. That holds for projections without biases only.
    """
    check_activation(info, info.activation)
    extra = info.extra

    def factor(name: str) -> float:
        value = extra.get(name)
        return 1.0 if value is None else float(value)

    inward = factor("attention_in_multiplier")
    if inward != 1.0 and info.attention_bias:
        raise UnsupportedModel(f"{info.architecture} has biases and attention_in_multiplier {inward}; one is run")
    attention = llama_attention(info)
    attention = replace(
        attention,
        scale=attention.scale * inward**2 * factor("key_multiplier"),
        output_scale=inward * factor("attention_out_multiplier"),
    )
    size = int(extra.get("mamba_d_ssm") or int(extra.get("mamba_expand", 2)) * info.hidden_size)
    mixer = read_mamba2(info, MAMBA2_FIELDS, size)
    parts = [float(part) * factor("ssm_in_multiplier") for part in extra.get("ssm_multipliers") or [1.0] * 5]
    if extra.get("mamba_proj_bias") and factor("ssm_in_multiplier") != 1.0:
        raise UnsupportedModel(f"{info.architecture} has mamba_proj_bias and ssm_in_multiplier; one is run")
    norm: Literal["gate_first", "norm_first", "none"] = "none"
    if extra.get("mamba_rms_norm", False):
        norm = "norm_first" if extra.get("mamba_norm_before_gate", True) else "gate_first"
    gate, x, b, c, dt = parts
    mixer = replace(
        mixer,
        conv_bias=bool(extra.get("mamba_conv_bias", True)),
        input_bias=bool(extra.get("mamba_proj_bias", False)),
        output_bias=bool(extra.get("projectors_bias", False)),
        norm=norm,
        norm_groups=mixer.num_groups,
        part_scales=(gate, x, b, c, dt),
        output_scale=factor("ssm_out_multiplier"),
    )
    gate_scale, down_scale = map(float, extra.get("mlp_multipliers") or (1.0, 1.0))
    mlp = replace(llama_mlp(info), gate_scale=gate_scale, output_scale=down_scale)
    shape = llama_shape(info, attention, mlp)
    return replace(
        shape,
        layers=tuple(replace(layer, mixers=(*layer.mixers, mixer)) for layer in shape.layers),
        embedding_scale=factor("embedding_multiplier"),
        logit_scale=factor("lm_head_multiplier"),
    )


def jamba_shape(info: ModelInfo) -> DecoderShape:
    """Mamba-1 layers and attention without rope; some layers have experts."""
    check_activation(info, info.activation)
    extra = info.extra
    mixer = Mamba1Shape(
        size=int(extra.get("mamba_expand", 2)) * info.hidden_size,
        state_size=needed_number(info, "mamba_d_state"),
        dt_rank=read_rank(info, "mamba_dt_rank"),
        conv_width=read_conv_width(info, "mamba_d_conv"),
        conv_bias=bool(extra.get("mamba_conv_bias", True)),
        bias=bool(extra.get("mamba_proj_bias", False)),
        norms=True,
    )

    def is_of(layer: int, kind: str, period: int, offset: int) -> bool:
        period, offset = extra.get(f"{kind}_layer_period", period), extra.get(f"{kind}_layer_offset", offset)
        return layer % int(period) == int(offset)

    layers = range(info.num_layers)
    kinds = [FULL if is_of(layer, "attn", 8, 4) else "" for layer in layers]
    dense: FeedShape = llama_mlp(info)
    feeds = [dense] * info.num_layers
    if info.num_experts > 1:
        rule = RouterRule(needed_number(info, "num_experts_per_tok"), renormalize=False)
        experts = expert_shape(info, info.ffn_size, rule)
        feeds = [experts if is_of(layer, "expert", 2, 1) else dense for layer in layers]
    attention = replace(llama_attention(info), qkv_bias=False, output_bias=False)
    return _without_rope(_hybrid(info, attention, kinds, mixer, feeds), info)


def _hybrid(
    info: ModelInfo, attention: AttentionShape, kinds: Sequence[str], mixer: MixerShape, feeds: Sequence[FeedShape]
) -> DecoderShape:
    shape = llama_shape(info, attention)
    layers = (
        replace(layer, mixers=layer.mixers if kind == FULL else (mixer,), feed=feed)
        for layer, kind, feed in zip(shape.layers, kinds, feeds, strict=True)
    )
    return replace(shape, layers=tuple(layers))


def _without_rope(shape: DecoderShape, info: ModelInfo) -> DecoderShape:
    return replace(shape, ropes=(RopeShape(NO_ROPE, info.head_dim),))


def granite_hybrid_rules(shape: DecoderShape) -> Rules:
    layer, has_experts = "model.layers.{n}", not all(hasattr(each.feed, "activation") for each in shape.layers)
    shared = "layers.{n}.mlp.shared" if has_experts else "layers.{n}.mlp"
    experts = f"{layer}.block_sparse_moe"
    names: dict[str, str | None] = {
        f"{layer}.shared_mlp.input_linear.{{kind}}": f"{shared}.gate_up.{{kind}}",
        f"{layer}.shared_mlp.output_linear.{{kind}}": f"{shared}.down.{{kind}}",
        f"{experts}.router.layer.weight": "layers.{n}.mlp.router.weight",
        f"{experts}.router.weight": "layers.{n}.mlp.router.weight",
        f"{experts}.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}",
    }
    return llama_rules(shape, _mixer_norms(shape) | mamba_names(f"{layer}.mamba") | names)


def hybrid_rules(shape: DecoderShape) -> Rules:
    """Bamba, Falcon-H1 and Jamba."""
    layer, feed = "model.layers.{n}", "model.layers.{n}.feed_forward"
    names: dict[str, str | None] = {
        "model.final_layernorm.weight": "norm.weight",
        f"{layer}.pre_ff_layernorm.weight": "layers.{n}.mlp_norm.weight",
        f"{feed}.router.weight": "layers.{n}.mlp.router.weight",
        f"{feed}.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}",
        f"{feed}.down_proj.{{kind}}": "layers.{n}.mlp.down.{kind}",
        f"{feed}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.gate_up.{part}.{kind}",
        f"{layer}.mamba.mup_vector": None,  # computed from the config
    }
    return llama_rules(shape, _mixer_norms(shape) | mamba_names(f"{layer}.mamba") | names)


def _mixer_norms(shape: DecoderShape) -> dict[str, str | None]:
    return {
        f"model.layers.{number}.input_layernorm.weight": f"layers.{number}.{layer.mixers[0].name}_norm.weight"
        for number, layer in enumerate(shape.layers)
    }


# Nemotron-H and Nemotron 3: layers of one sublayer each, which is Mamba-2, attention without rope, an MLP with squared
# ReLU, or experts with it.

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_FIELDS = {
    "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "num_groups": "n_groups",
    "state_size": "ssm_state_size", "conv_width": "conv_kernel",
}  # fmt: skip


def nemotron_h_shape(info: ModelInfo) -> DecoderShape:
    extra = info.extra
    check_activation(info, str(extra.get("mamba_hidden_act", "silu")))
    size = needed_number(info, "mamba_num_heads") * needed_number(info, "mamba_head_dim")
    bias = bool(extra.get("use_bias", False))
    mixer = read_mamba2(info, _FIELDS, size)
    mixer = replace(
        mixer,
        conv_bias=bool(extra.get("use_conv_bias", True)),
        input_bias=bias,
        output_bias=bias,
        dt_min=float(extra.get("time_step_min", 0.001)),  # the smallest step size, and no largest one
        dt_max=float("inf"),
        norm_groups=mixer.num_groups,
    )
    attention = replace(llama_attention(info), qkv_bias=False, output_bias=False)
    mlp = MlpShape(
        size=info.ffn_size,
        activation=str(extra.get("mlp_hidden_act", "relu2")),
        gated=False,
        bias=info.mlp_bias,
        down_bias=info.mlp_bias,
    )
    norm = NormShape(eps=info.norm_eps)
    layers = {
        "mamba": LayerShape(mixers=(mixer,), feed=None, norm=norm),
        "attention": LayerShape(mixers=(attention,), feed=None, norm=norm),
        "mlp": LayerShape(mixers=(), feed=mlp, norm=norm),
    }
    kinds = _layer_kinds(info)
    if "moe" in kinds:
        layers["moe"] = LayerShape(mixers=(), feed=_experts(info, mlp), norm=norm)
    return replace(
        llama_shape(info),
        layers=tuple(layers[kind] for kind in kinds),
        ropes=(RopeShape(RopeInfo(kind="none"), info.head_dim),) if "attention" in kinds else (),
    )


def _experts(info: ModelInfo, mlp: MlpShape) -> ExpertShape:
    extra = info.extra
    if mlp.activation != "relu2":
        raise UnsupportedModel(f"{info.architecture} has experts with {mlp.activation}; only relu2 is built")
    experts = expert_shape(info, needed_number(info, "moe_intermediate_size"), sigmoid_rule(info))
    shared = replace(mlp, size=needed_number(info, "moe_shared_expert_intermediate_size"))
    latent = 0 if extra.get("moe_latent_size") is None else needed_number(info, "moe_latent_size")
    return replace(
        experts,
        gate="relu2",
        correction_bias=True,
        shared=shared,
        latent_size=latent,
        latent_bias=bool(latent) and info.mlp_bias,
    )


def _layer_kinds(info: ModelInfo) -> list[str]:
    kinds: Any = info.extra.get("layers_block_type") or info.extra.get("layer_types")
    if kinds is None:
        kinds = [_PATTERN.get(sign, sign) for sign in info.extra.get("hybrid_override_pattern") or ""]
    kinds = [_KINDS.get(kind, kind) for kind in kinds]
    if not kinds:
        raise BadCheckpoint(
            f"config.json of {info.architecture} has neither layers_block_type nor hybrid_override_pattern; one must "
            "say what each layer is"
        )
    if unknown := {*kinds} - {*_PATTERN.values()}:
        raise BadCheckpoint(
            f"config.json of {info.architecture} has layers of kind {unknown!r}; layers_block_type or "
            "hybrid_override_pattern must list mamba, attention, mlp or moe"
        )
    return kinds


def nemotron_h_rules(shape: DecoderShape) -> Rules:
    names: dict[str, str | None] = {}
    for number, layer in enumerate(shape.layers):
        part = layer.mixers[0].name if layer.mixers else "mlp"
        names[f"model.layers.{number}.norm.weight"] = f"layers.{number}.{part}_norm.weight"
    mixer = "model.layers.{n}.mixer"
    names |= {
        "model.embeddings.weight": "embedding.weight",
        "model.norm_f.weight": "norm.weight",
        f"{mixer}.o_proj.{{kind}}": "layers.{n}.attention.output.{kind}",
        f"{mixer}.gate.weight": "layers.{n}.mlp.router.weight",
        f"{mixer}.gate.e_score_correction_bias": "layers.{n}.mlp.correction_bias",
        f"{mixer}.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}",
        f"{mixer}.fc1_latent_proj.{{kind}}": "layers.{n}.mlp.into_latent.{kind}",
        f"{mixer}.fc2_latent_proj.{{kind}}": "layers.{n}.mlp.from_latent.{kind}",
        f"{mixer}.shared_experts.{{part}}_proj.{{kind}}": "layers.{n}.mlp.shared.{part}.{kind}",
        f"{mixer}.up_proj.{{kind}}": "layers.{n}.mlp.up.{kind}",
        f"{mixer}.down_proj.{{kind}}": "layers.{n}.mlp.down.{kind}",
        **{f"{mixer}.{part}_proj.{{kind}}": f"layers.{{n}}.attention.qkv.{part}.{{kind}}" for part in "qkv"},
        **mamba_names(mixer),
    }
    left_out = dict.fromkeys(("mtp.*", "model.mtp.*", "backbone.mtp.*"))
    return Rules(left_out) | llama_rules(shape, names, ("backbone", "model", ""))


# LFM2 and LFM2-MoE: short convolutions, and attention in some layers.

CONV, LFM2_FULL = "conv", "full_attention"


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
        for layer, kind in zip(shape.layers, _lfm2_layer_kinds(info), strict=True)
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


def _lfm2_layer_kinds(info: ModelInfo) -> list[str]:
    kinds = info.extra.get("layer_types")
    if kinds is None:
        attending = info.extra.get("full_attn_idxs")
        layers = range(info.num_layers)
        return [LFM2_FULL if attending is None or layer in attending else CONV for layer in layers]
    if not isinstance(kinds, list) or len(kinds) != info.num_layers or not {*kinds} <= {CONV, LFM2_FULL}:
        raise BadCheckpoint(
            f"layer_types of config.json is {kinds!r}; it must say {CONV} or {LFM2_FULL} for each of "
            f"{info.num_layers} layers"
        )
    return kinds


def lfm2_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, _lfm2_names(shape))


def lfm2_vl_rules(shape: DecoderShape) -> Rules:
    return vision_text_rules(shape, _lfm2_names(shape))


def _lfm2_names(shape: DecoderShape) -> dict[str, str | None]:
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
    return names


# Qwen3-Next and the text models of Qwen3.5, dense and with experts.
#
# Most layers mix tokens by a gated delta rule, every fourth one by gated attention with a rope over part of each head.
# Norms are stored as weight - 1. Qwen3-Next stores the inputs of the delta rule interleaved by key head, Qwen3.5 one
# part after another. Weights for pictures and for drafting tokens (MTP) are left out.

LINEAR, NEXT_FULL = "linear_attention", "full_attention"


def qwen3_next_shape(info: ModelInfo) -> DecoderShape:
    return _next_shape(info, interleaved=True)


def qwen3_5_shape(info: ModelInfo) -> DecoderShape:
    return _next_shape(info, interleaved=False)


def _next_shape(info: ModelInfo, interleaved: bool) -> DecoderShape:
    attention = replace(llama_attention(info), qk_norm="heads", gated=True)
    delta = _delta_shape(info, interleaved)
    dense = llama_mlp(info)
    feed_of = qwen_shared_feeds(info) if info.num_experts else lambda layer: dense
    shape = llama_shape(info, attention, norm=NormShape(eps=info.norm_eps, offset=1.0))
    layers = (
        replace(layer, mixers=(delta,) if kind == LINEAR else layer.mixers, feed=feed_of(number))
        for number, (layer, kind) in enumerate(zip(shape.layers, _next_layer_kinds(info), strict=True))
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


def _next_layer_kinds(info: ModelInfo) -> list[str]:
    kinds = info.extra.get("layer_types")
    if kinds is None:
        interval = needed_number(info, "full_attention_interval")
        kinds = [LINEAR if (layer + 1) % interval else NEXT_FULL for layer in range(info.num_layers)]
    if not isinstance(kinds, list) or len(kinds) != info.num_layers or not {*kinds} <= {LINEAR, NEXT_FULL}:
        raise BadCheckpoint(
            f"layer_types of config.json is {kinds!r}; it must say {LINEAR} or {NEXT_FULL} for each of "
            f"{info.num_layers} layers"
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
