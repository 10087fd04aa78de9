"""DeepSeek-V2 and V3: multi-head latent attention, and experts chosen in groups."""

from __future__ import annotations

import math
from dataclasses import replace

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape, RopeShape
from slipstream.nn.models.llama import llama_mlp, llama_shape
from slipstream.nn.models.moe import expert_shape, moe_rules, needed_number, with_feeds
from slipstream.nn.shapes import AttentionShape, LatentShape
from slipstream.nn.weights.rules import Rules
from slipstream.ops.moe.reference import RouterRule


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
