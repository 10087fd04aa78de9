"""Gemma 4, text part: other heads in layers without a window, keys that are values, per-layer inputs, experts, and
trailing layers that share KV caches. What a model does not have its config.json sets to 0 or leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.gemma import GEMMA_NORMS
from slipstream.nn.models.gemma3n import (
    LAYER_INPUT_NAMES,
    kv_sources,
    other_modalities,
    unused_sources,
    with_gemma_ends,
)
from slipstream.nn.models.llama import llama_attention, llama_mlp, llama_rules, llama_shape
from slipstream.nn.models.moe import needed_number
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.shapes import (
    AttentionShape,
    DenseAndExpertsShape,
    ExpertShape,
    FeedShape,
    LayerInputShape,
    MlpShape,
    NormShape,
)
from slipstream.nn.weights.rules import Rules
from slipstream.ops.moe.reference import RouterRule

_NAMES: dict[str, str | None] = {
    "model.layers.{n}.layer_scalar": "layers.{n}.output_scale",
    "model.layers.{n}.router.scale": "layers.{n}.mlp.router_norm.weight",
    "model.layers.{n}.router.per_expert_scale": "layers.{n}.mlp.expert_scale",
    "model.layers.{n}.router.proj.weight": "layers.{n}.mlp.routed.router.weight",
    "model.layers.{n}.experts.{e}.{part}_proj.{kind}": "layers.{n}.mlp.routed.experts.{e}.{part}.{kind}",
    "model.layers.{n}.post_feedforward_layernorm_1.weight": "layers.{n}.mlp.dense_out_norm.weight",
    "model.layers.{n}.post_feedforward_layernorm_2.weight": "layers.{n}.mlp.routed_out_norm.weight",
    "model.layers.{n}.pre_feedforward_layernorm_2.weight": "layers.{n}.mlp.routed_norm.weight",
}


def gemma4_shape(info: ModelInfo) -> DecoderShape:
    listed = layer_windows(info, lambda layer: (layer + 1) % 6 != 0)
    windows = (*listed[:-1], 0)  # the last layer sees all positions, whatever layer_types says
    local = replace(llama_attention(info), scale=1.0, qk_norm="heads", value_norm=True, rope=1)
    whole = _global_attention(info, windows)
    mlp = llama_mlp(info)
    size = int(info.extra.get("hidden_size_per_layer_input") or 0)
    shape = llama_shape(info, local, mlp, windows=windows, norm_after=True)
    layers = []
    for layer, window, source in zip(shape.layers, windows, kv_sources(info, windows), strict=True):
        is_wide = source is not None and bool(info.extra.get("use_double_wide_mlp"))
        mixer = replace(local if window else whole, window=window, kv_source=source)
        feed = _feed(info, replace(mlp, size=mlp.size * (2 if is_wide else 1)))
        own = LayerInputShape(size=size, activation=info.activation) if size else None
        layers.append(replace(layer, mixers=(mixer,), feed=feed, layer_input=own, output_scale=True))
    return with_gemma_ends(replace(shape, layers=tuple(layers)), info, size, whole.head_dim)


def _global_attention(info: ModelInfo, windows: Sequence[int]) -> AttentionShape:
    """The attention of layers without a window. Newer configs list what differs by layer, if anything does; older ones
    have one value."""
    extra = info.extra
    is_value = bool(extra.get("attention_k_eq_v"))
    fields: dict[str, Any] = {"head_dim": extra.get("global_head_dim") or 512}
    if is_value and extra.get("num_global_key_value_heads"):
        fields["num_key_value_heads"] = extra["num_global_key_value_heads"]
    listed = extra.get("per_layer_config")
    if listed is not None:
        wide = [number for number, window in enumerate(windows) if not window]
        of_layer = {int(number): fields for number, fields in listed.items()}  # "05" beside "11"
        fields = of_layer.get(wide[0], {})
        if {*of_layer} - {*wide} or any(of_layer.get(number, {}) != fields for number in wide):
            raise UnsupportedModel(
                "per_layer_config of config.json changes other layers than those without a window, "
                "or not all of them alike, which is not supported"
            )
    head_dim = int(fields.get("head_dim") or info.head_dim)
    num_kv_heads = int(fields.get("num_key_value_heads") or info.num_kv_heads)
    if set(fields) - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(f"per_layer_config of config.json changes {sorted(fields)}; only heads are supported")
    return replace(
        llama_attention(info), head_dim=head_dim, num_kv_heads=num_kv_heads, scale=1.0, qk_norm="heads",
        value_norm=True, key_is_value=is_value,
    )  # fmt: skip


def _feed(info: ModelInfo, mlp: MlpShape) -> FeedShape:
    if not info.extra.get("enable_moe_block"):
        return mlp
    if info.activation != "gelu_pytorch_tanh":
        raise UnsupportedModel(f"Gemma 4 with experts of {info.activation} is not supported; only gelu_pytorch_tanh is")
    experts = ExpertShape(
        num_experts=needed_number(info, "num_experts"),
        size=needed_number(info, "moe_intermediate_size"),
        router=RouterRule(needed_number(info, "top_k_experts")),
        gate="gelu_tanh",
    )
    return DenseAndExpertsShape(mlp=mlp, experts=experts, norm=NormShape(eps=info.norm_eps))


def gemma4_rules(shape: DecoderShape, roots: Sequence[str] = ("model", "")) -> Rules:
    names = unused_sources(shape) | GEMMA_NORMS | LAYER_INPUT_NAMES | _NAMES
    if any(isinstance(layer.feed, DenseAndExpertsShape) for layer in shape.layers):
        names |= {
            "model.layers.{n}.mlp.down_proj.{kind}": "layers.{n}.mlp.dense.down.{kind}",
            "model.layers.{n}.mlp.{part}_proj.{kind}": "layers.{n}.mlp.dense.gate_up.{part}.{kind}",
        }
    return llama_rules(shape, names, roots)


def gemma4_text_rules(shape: DecoderShape) -> Rules:
    """For checkpoints with image and audio encoders, which are left out."""
    return other_modalities(shape) | gemma4_rules(shape, ("model.language_model", "language_model.model"))
