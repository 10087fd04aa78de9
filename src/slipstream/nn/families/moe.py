"""Mixtures of experts over dense attention: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and GLM-4-MoE."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import EXPERT_COUNTS, ModelInfo
from slipstream.nn.decoder import DecoderShape, RopeShape
from slipstream.nn.families.llama import (
    layer_windows,
    llama_attention,
    llama_mlp,
    llama_rules,
    llama_shape,
    mistral_windows,
)
from slipstream.nn.families.llama_variants import vision_text_rules
from slipstream.nn.shapes import AttentionShape, ExpertShape, FeedShape, LatentShape, MlpShape
from slipstream.nn.weights.source import Rules
from slipstream.ops.gemm.moe.reference import CLAMP_LIMIT, RouterRule


def mixtral_shape(info: ModelInfo) -> DecoderShape:
    feed = expert_shape(info, info.ffn_size, RouterRule(needed_number(info, "num_experts_per_tok")))
    return with_feeds(llama_shape(info, windows=mistral_windows(info)), lambda layer: feed)


def olmoe_shape(info: ModelInfo) -> DecoderShape:
    if info.extra.get("clip_qkv") is not None:
        raise UnsupportedModel(f"{info.architecture} clips q, k and v (clip_qkv), which is not supported")
    feed = expert_shape(info, info.ffn_size, _softmax_rule(info))
    attention = replace(llama_attention(info), qk_norm="whole")
    return with_feeds(llama_shape(info, attention), lambda layer: feed)


def qwen2_moe_shape(info: ModelInfo) -> DecoderShape:
    """Unlike in Qwen2, the bias of q, k and v may be off, and windows are those of every second lower layer."""
    extra = info.extra
    attention = replace(llama_attention(info), qkv_bias=bool(extra.get("qkv_bias", True)), output_bias=False)
    last = int(extra.get("max_window_layers", 28)) if extra.get("use_sliding_window") else 0
    windows = layer_windows(info, lambda layer: layer % 2 == 0 and layer < last)
    return with_feeds(llama_shape(info, attention, windows=windows), qwen_shared_feeds(info))


def qwen_shared_feeds(info: ModelInfo) -> Callable[[int], FeedShape]:
    """The feed-forward of a layer: experts and a shared expert with a gate, or an ordinary MLP."""
    shared = replace(llama_mlp(info), size=needed_number(info, "shared_expert_intermediate_size"))
    feed = expert_shape(info, needed_number(info, "moe_intermediate_size"), _softmax_rule(info))
    return _where_sparse(info, replace(feed, shared=shared, shared_gate=True))


def qwen3_moe_shape(info: ModelInfo) -> DecoderShape:
    feed = expert_shape(info, needed_number(info, "moe_intermediate_size"), _softmax_rule(info))
    window = int(info.extra.get("sliding_window") or 0) if info.extra.get("use_sliding_window") else 0
    attention = replace(llama_attention(info), qk_norm="heads", output_bias=info.attention_bias)
    return with_feeds(llama_shape(info, attention, windows=(window,) * info.num_layers), _where_sparse(info, feed))


def qwen3_vl_moe_shape(info: ModelInfo) -> DecoderShape:
    """The text part of Qwen3-VL with experts, whose scores are always divided by the sum of the chosen ones."""
    feed = expert_shape(
        info, needed_number(info, "moe_intermediate_size"), replace(_softmax_rule(info), renormalize=True)
    )
    attention = replace(llama_attention(info), qk_norm="heads", output_bias=info.attention_bias)
    shape = with_feeds(llama_shape(info, attention), _where_sparse(info, feed))
    return replace(shape, transposed_experts="halves")


def glm4_moe_shape(info: ModelInfo) -> DecoderShape:
    """Layers before `first_k_dense_replace` are dense; the router is DeepSeek-V3's."""
    size, extra = needed_number(info, "moe_intermediate_size"), info.extra
    rule = sigmoid_rule(info)
    shared = replace(llama_mlp(info), size=size * int(extra.get("n_shared_experts", 1)))
    feed = replace(expert_shape(info, size, rule), correction_bias=True, shared=shared)
    dense, first = llama_mlp(info), int(extra.get("first_k_dense_replace", 1))
    attention = replace(llama_attention(info), output_bias=False)
    if extra.get("use_qk_norm"):
        attention = replace(attention, qk_norm="heads")
    return with_feeds(llama_shape(info, attention), lambda layer: dense if layer < first else feed)


def moe_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, expert_names())


def vision_text_moe_rules(shape: DecoderShape) -> Rules:
    return vision_text_rules(shape, expert_names())


def expert_names() -> dict[str, str | None]:
    """Tensor names of experts, as most families have them."""
    layer = "model.layers.{n}.mlp"
    return {
        f"{layer}.gate.weight": "layers.{n}.mlp.router.weight",
        f"{layer}.gate.e_score_correction_bias": "layers.{n}.mlp.correction_bias",
        f"{layer}.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}",
        f"{layer}.shared_expert_gate.weight": "layers.{n}.mlp.shared_gate.weight",
        f"{layer}.shared_expert.down_proj.{{kind}}": "layers.{n}.mlp.shared.down.{kind}",
        f"{layer}.shared_expert.{{part}}_proj.{{kind}}": "layers.{n}.mlp.shared.gate_up.{part}.{kind}",
        f"{layer}.shared_experts.down_proj.{{kind}}": "layers.{n}.mlp.shared.down.{kind}",
        f"{layer}.shared_experts.{{part}}_proj.{{kind}}": "layers.{n}.mlp.shared.gate_up.{part}.{kind}",
    }


def mixtral_rules(shape: DecoderShape) -> Rules:
    layer = "model.layers.{n}.block_sparse_moe"
    names = {"w1": "gate", "w2": "down", "w3": "up"}
    own: dict[str, str | None] = {
        f"{layer}.experts.{{e}}.{theirs}.{{kind}}": f"layers.{{n}}.mlp.experts.{{e}}.{ours}.{{kind}}"
        for theirs, ours in names.items()
    }
    stacked = {f"{layer}.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}"}
    gate = {f"{layer}.gate.weight": "layers.{n}.mlp.router.weight"}
    return Rules({**own, **stacked, **gate}) | moe_rules(shape)


def with_feeds(shape: DecoderShape, feed_of: Callable[[int], FeedShape]) -> DecoderShape:
    layers = (replace(layer, feed=feed_of(number)) for number, layer in enumerate(shape.layers))
    return replace(shape, layers=tuple(layers))


def _where_sparse(info: ModelInfo, feed: ExpertShape) -> Callable[[int], FeedShape]:
    """Qwen: layers of `mlp_only_layers`, and all but every `decoder_sparse_step`th, have an ordinary MLP."""
    dense: MlpShape = llama_mlp(info)
    step, only = int(info.extra.get("decoder_sparse_step", 1)), set(info.extra.get("mlp_only_layers") or ())
    return lambda layer: dense if layer in only or (layer + 1) % step else feed


def _softmax_rule(info: ModelInfo) -> RouterRule:
    renormalize = bool(info.extra.get("norm_topk_prob", False))
    return RouterRule(needed_number(info, "num_experts_per_tok"), renormalize=renormalize)


def sigmoid_rule(info: ModelInfo) -> RouterRule:
    """The rule of DeepSeek-V3's router. A config without groups has one."""
    extra = info.extra
    return RouterRule(
        needed_number(info, "num_experts_per_tok"),
        "sigmoid",
        bool(extra.get("norm_topk_prob", True)),
        float(extra.get("routed_scaling_factor", 1.0)),
        int(extra.get("n_group", 1)),
        int(extra.get("topk_group", 1)),
        "top2",
    )


def expert_shape(info: ModelInfo, size: int, rule: RouterRule) -> ExpertShape:
    count = info.num_experts
    if count < rule.top_k:
        names = ", ".join(EXPERT_COUNTS)
        raise BadCheckpoint(f"config.json has {count} experts and takes {rule.top_k} a token; check {names}")
    _check_groups(count, rule)
    if info.activation != "silu":
        raise UnsupportedModel(f"{info.architecture} has experts with {info.activation}; only silu is built")
    return ExpertShape(num_experts=count, size=size, router=rule)


def _check_groups(num_experts: int, rule: RouterRule) -> None:
    """Raises BadCheckpoint if the experts cannot be divided into groups of which some are kept."""
    groups, kept = rule.num_groups, rule.kept_groups
    if groups < 1 or num_experts % groups:
        raise BadCheckpoint(f"config.json divides {num_experts} experts into {groups} groups (n_group) of one size")
    if not 1 <= kept <= groups:
        raise BadCheckpoint(f"config.json keeps {kept} (topk_group) of {groups} groups of experts (n_group)")
    size = num_experts // groups
    if kept * size < rule.top_k:
        raise BadCheckpoint(
            f"config.json takes {rule.top_k} experts a token (num_experts_per_tok) from {kept} groups (topk_group) "
            f"of {size}"
        )
    if groups > 1 and size < 2 and rule.group_score == "top2":
        raise BadCheckpoint(
            f"config.json has as many groups (n_group) as experts, {groups}, and a group is scored by its best two"
        )


def needed_number(info: ModelInfo, name: str) -> int:
    """A number from 1 up of config.json."""
    value: Any = info.extra.get(name)
    if not isinstance(value, int) or value < 1:
        raise BadCheckpoint(f"config.json has no {name}, which {info.architecture} needs; it is {value!r}")
    return value


# gpt-oss: experts with biases and a clamped gate, attention with sinks, a window in every second layer, YaRN.


def gpt_oss_shape(info: ModelInfo) -> DecoderShape:
    """The layers with a window are the first, the third and so on."""
    limit = float(info.extra.get("swiglu_limit") or CLAMP_LIMIT)
    if limit != CLAMP_LIMIT:
        raise UnsupportedModel(f"gpt-oss with a swiglu_limit of {limit} is not supported; only {CLAMP_LIMIT} is")
    # a softmax over the chosen logits is the softmax over all of them, renormalized
    feed = expert_shape(info, info.ffn_size, RouterRule(needed_number(info, "num_experts_per_tok")))
    feed = replace(feed, gate="clamped_swiglu", bias=True, router_bias=True)
    windows = layer_windows(info, lambda layer: layer % 2 == 0)
    shape = llama_shape(info, replace(llama_attention(info), sinks=True), windows=windows)
    return replace(with_feeds(shape, lambda layer: feed), transposed_experts="interleaved")


def gpt_oss_rules(shape: DecoderShape) -> Rules:
    layer = "model.layers.{n}"
    return llama_rules(
        shape,
        {
            f"{layer}.self_attn.sinks": "layers.{n}.attention.sinks",
            f"{layer}.mlp.router.{{kind}}": "layers.{n}.mlp.router.{kind}",
            f"{layer}.mlp.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}",
        },
    )


# DeepSeek-V2 and V3: multi-head latent attention, and experts chosen in groups.


def deepseek_v2_shape(info: ModelInfo) -> DecoderShape:
    """The router scores by softmax and never normalizes the weights of the chosen experts."""
    extra = info.extra
    method = extra.get("topk_method") or "greedy"
    _refuse(info, "topk_method", method, ("greedy", "group_limited_greedy"))
    _refuse(info, "scoring_func", extra.get("scoring_func") or "softmax", ("softmax",))
    _refuse(info, "norm_topk_prob", bool(extra.get("norm_topk_prob")), (False,))
    grouped = method == "group_limited_greedy"
    rule = RouterRule(
        needed_number(info, "num_experts_per_tok"),
        renormalize=False,
        scale=float(extra.get("routed_scaling_factor") or 1.0),
        num_groups=needed_number(info, "n_group") if grouped else 1,
        kept_groups=needed_number(info, "topk_group") if grouped else 1,
    )
    return _shape(info, rule, correction_bias=False, first_dense=0, interleaved=True)


def deepseek_v3_shape(info: ModelInfo) -> DecoderShape:
    """The router scores by sigmoid; a bias changes which experts are chosen."""
    extra = info.extra
    _refuse(info, "topk_method", extra.get("topk_method") or "noaux_tc", ("noaux_tc",))
    _refuse(info, "scoring_func", extra.get("scoring_func") or "sigmoid", ("sigmoid",))
    rule = RouterRule(
        needed_number(info, "num_experts_per_tok"),
        "sigmoid",
        bool(extra.get("norm_topk_prob", True)),
        float(extra.get("routed_scaling_factor", 2.5)),
        int(extra.get("n_group") or 1),
        int(extra.get("topk_group") or 1),
        "top2",
    )
    return _shape(info, rule, correction_bias=True, first_dense=3, interleaved=bool(extra.get("rope_interleave", True)))


def _shape(
    info: ModelInfo, rule: RouterRule, *, correction_bias: bool, first_dense: int, interleaved: bool
) -> DecoderShape:
    extra, size = info.extra, needed_number(info, "moe_intermediate_size")
    _refuse(info, "moe_layer_freq", extra.get("moe_layer_freq") or 1, (1,))
    latent = LatentShape(
        kv_rank=needed_number(info, "kv_lora_rank"),
        q_rank=int(extra.get("q_lora_rank") or 0),
        nope_dim=needed_number(info, "qk_nope_head_dim"),
        rope_dim=needed_number(info, "qk_rope_head_dim"),
        value_dim=needed_number(info, "v_head_dim"),
        interleaved=interleaved,
    )
    if info.attention_bias and not latent.q_rank:
        raise UnsupportedModel(f"{info.architecture} with attention_bias and no q_lora_rank is not supported")
    attention = AttentionShape(
        num_heads=info.num_heads,
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * _yarn_scale(info) ** 2,
        qkv_bias=info.attention_bias,
        output_bias=info.attention_bias,
        latent=latent,
    )
    dense = llama_mlp(info)
    shared = replace(dense, size=size * needed_number(info, "n_shared_experts"))
    feed = replace(expert_shape(info, size, rule), correction_bias=correction_bias, shared=shared)
    first = int(extra.get("first_k_dense_replace", first_dense))
    shape = with_feeds(llama_shape(info, attention), lambda layer: dense if layer < first else feed)
    return replace(shape, ropes=(RopeShape(info.rope, latent.rope_dim),))


def _yarn_scale(info: ModelInfo) -> float:
    """YaRN's factor of queries and keys, where the config applies it to all dimensions and not only to rotated ones."""
    factors = info.rope.factors
    strength, factor = factors.get("mscale_all_dim"), float(factors.get("factor") or 1.0)
    if info.rope.kind == "default" or not strength or factor <= 1:
        return 1.0
    return 0.1 * float(strength) * math.log(factor) + 1.0


def _refuse(info: ModelInfo, name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise UnsupportedModel(
            f"{info.architecture} with {name} {value} is not supported; {', '.join(map(str, known))} is"
        )


def deepseek_rules(shape: DecoderShape) -> Rules:
    stored, own = "model.layers.{n}.self_attn", "layers.{n}.attention"
    return Rules(
        {
            f"{stored}.q_proj.{{kind}}": f"{own}.first.q.{{kind}}",
            f"{stored}.q_a_proj.{{kind}}": f"{own}.first.q.{{kind}}",
            f"{stored}.q_a_layernorm.weight": f"{own}.q_norm.weight",
            f"{stored}.q_b_proj.{{kind}}": f"{own}.queries.{{kind}}",
            f"{stored}.kv_a_proj_with_mqa.{{kind}}": f"{own}.first.kv.{{kind}}",
            f"{stored}.kv_a_layernorm.weight": f"{own}.kv_norm.weight",
            f"{stored}.kv_b_proj.{{kind}}": f"{own}.expand.{{kind}}",
        }
    ) | moe_rules(shape)
