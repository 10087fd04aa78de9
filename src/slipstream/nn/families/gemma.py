"""The Gemma family: Gemma 1, Gemma 2 and the text part of Gemma 3.

Norms are stored as weight - 1, embeddings are scaled. From Gemma 2 on: norms after sublayers too, layers with and
without a window. Gemma 2 caps scores and logits; Gemma 3 norms queries and keys, and its window layers have another
rope base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.decoder import DecoderShape, RopeShape
from slipstream.nn.families.llama import (
    layer_windows,
    llama_attention,
    llama_mlp,
    llama_rules,
    llama_shape,
    with_local_rope,
)
from slipstream.nn.families.moe import needed_number
from slipstream.nn.shapes import (
    AltUpShape,
    AttentionShape,
    DenseAndExpertsShape,
    ExpertShape,
    FeedShape,
    LayerInputShape,
    LayerInputsShape,
    MlpShape,
    NormShape,
)
from slipstream.nn.weights.source import Rules
from slipstream.ops.gemm.moe.reference import RouterRule


def gemma_shape(info: ModelInfo) -> DecoderShape:
    """Gemma 1: Llama's with scaled embeddings and norms that are stored as weight - 1."""
    shape = llama_shape(info, norm=NormShape(eps=info.norm_eps, offset=1.0))
    return replace(shape, embedding_scale=math.sqrt(info.hidden_size))


def gemma2_shape(info: ModelInfo) -> DecoderShape:
    """Every second layer sees all positions, starting with the second."""
    return _gemma_shape(info, pattern=2, soft_cap=float(info.extra.get("attn_logit_softcapping") or 0.0))


def gemma3_shape(info: ModelInfo) -> DecoderShape:
    """Usually every sixth layer sees all positions; the layers with a window may have a rope of their own."""
    shape = _gemma_shape(info, pattern=info.extra.get("sliding_window_pattern") or 6, qk_norm="heads")
    return with_local_rope(shape, info)


def _gemma_shape(
    info: ModelInfo, pattern: int, *, soft_cap: float = 0.0, qk_norm: Literal["none", "heads"] = "none"
) -> DecoderShape:
    extra = info.extra
    scalar = float(extra.get("query_pre_attn_scalar") or 256)
    if not 0 < scalar < math.inf:
        raise BadCheckpoint(f"query_pre_attn_scalar of config.json is {scalar}; it must be over 0")
    windows = layer_windows(info, lambda layer: (layer + 1) % pattern != 0)
    if not info.is_causal:
        windows = tuple(window // 2 for window in windows)  # to each side
    attention = replace(llama_attention(info), scale=scalar**-0.5, soft_cap=soft_cap, qk_norm=qk_norm)
    norm = NormShape(eps=info.norm_eps, offset=1.0)
    return replace(
        llama_shape(info, attention, windows=windows, norm=norm, norm_after=True),
        logit_cap=float(extra.get("final_logit_softcapping") or 0.0),
        embedding_scale=math.sqrt(info.hidden_size),
    )


GEMMA_NORMS: dict[str, str | None] = {
    "model.layers.{n}.post_attention_layernorm.weight": "layers.{n}.attention_out_norm.weight",
    "model.layers.{n}.pre_feedforward_layernorm.weight": "layers.{n}.mlp_norm.weight",
    "model.layers.{n}.post_feedforward_layernorm.weight": "layers.{n}.mlp_out_norm.weight",
}


def gemma_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, GEMMA_NORMS)


def gemma_text_rules(shape: DecoderShape) -> Rules:
    """For a checkpoint with an image encoder: the text part, as older and newer releases name it."""
    parts = ("vision_tower", "multi_modal_projector")
    pictures = {f"{root}{part}.*": None for root in ("", "model.") for part in parts}
    text = llama_rules(shape, GEMMA_NORMS, roots=("language_model.model", "model.language_model"))
    head = {"language_model.lm_head.{kind}": None if shape.tied else "head.{kind}"}
    return Rules(pictures | head) | text


# Gemma 3n, text part: AltUp copies, Laurel, per-layer inputs, sparse gates, trailing layers that share KV caches.

LAYER_INPUT_NAMES: dict[str, str | None] = {
    "model.embed_tokens_per_layer.weight": "layer_inputs.embedding.weight",
    "model.per_layer_model_projection.weight": "layer_inputs.projection.weight",
    "model.per_layer_projection_norm.weight": "layer_inputs.norm.weight",
    "model.layers.{n}.per_layer_input_gate.weight": "layers.{n}.layer_input.gate.weight",
    "model.layers.{n}.per_layer_projection.weight": "layers.{n}.layer_input.projection.weight",
    "model.layers.{n}.post_per_layer_input_norm.weight": "layers.{n}.layer_input_out_norm.weight",
}
_ALTUP_NAMES: dict[str, str | None] = {
    "model.altup_projections.{i}.weight": "copies.into.{i}.weight",
    "model.altup_unembed_projections.{i}.weight": "copies.out_of.{i}.weight",
    "model.layers.{n}.altup.correct_output_scale": "layers.{n}.altup.output_scale",
    "model.layers.{n}.altup.correction_coefs.weight": "layers.{n}.altup.correction.weight",
    "model.layers.{n}.altup.prediction_coefs.weight": "layers.{n}.altup.prediction.weight",
    "model.layers.{n}.altup.modality_router.weight": "layers.{n}.altup.router.weight",
    "model.layers.{n}.altup.router_norm.weight": "layers.{n}.altup.norm.weight",
    "model.layers.{n}.laurel.linear_{side}.weight": "layers.{n}.laurel.{side}.weight",
    "model.layers.{n}.laurel.post_laurel_norm.weight": "layers.{n}.laurel.norm.weight",
}


def gemma3n_shape(info: ModelInfo) -> DecoderShape:
    num_layers = info.num_layers
    windows = layer_windows(info, lambda layer: (layer + 1) % 5 != 0)
    sources = kv_sources(info, windows)
    attention = replace(llama_attention(info), scale=1.0, qk_norm="heads", value_norm=True)
    mlp = replace(llama_mlp(info), activation=info.activation)
    usual = [0.95 if num_layers > 10 and layer < 10 else 0.0 for layer in range(num_layers)]
    sizes = _by_layer(info, "intermediate_size", info.ffn_size)
    sparsities = _by_layer(info, "activation_sparsity_pattern", usual)
    altup = _altup_shape(info)
    size = needed_number(info, "hidden_size_per_layer_input")
    shape = llama_shape(info, attention, mlp, windows=windows, norm_after=True)
    layers = tuple(
        replace(
            layer,
            mixers=(replace(attention, window=window, kv_source=source, rope=1 if window else 0),),
            feed=replace(mlp, size=int(ffn_size), sparsity=float(sparsity)),
            layer_input=LayerInputShape(size=size, activation=info.activation),
            altup=altup,
        )
        for layer, window, source, ffn_size, sparsity in zip(
            shape.layers, windows, sources, sizes, sparsities, strict=True
        )
    )
    shape = with_gemma_ends(replace(shape, layers=layers), info, size)
    assert shape.layer_inputs is not None
    return replace(shape, layer_inputs=replace(shape.layer_inputs, rounded=True))


def _altup_shape(info: ModelInfo) -> AltUpShape:
    num_copies, active = needed_number(info, "altup_num_inputs"), int(info.extra.get("altup_active_idx", 0))
    if num_copies < 2:
        raise UnsupportedModel(f"{info.architecture}: altup_num_inputs is {num_copies}; 2 or more copies are run")
    if not 0 <= active < num_copies:
        raise BadCheckpoint(
            f"config.json of {info.architecture} has a wrong value: altup_active_idx is {active}, and there are "
            f"{num_copies} copies (altup_num_inputs), counted from 0"
        )
    return AltUpShape(
        num_copies=num_copies,
        active=active,
        scaled=bool(info.extra.get("altup_correct_scale", True)),
        laurel_rank=needed_number(info, "laurel_rank"),
    )


def with_gemma_ends(shape: DecoderShape, info: ModelInfo, input_size: int, head_dim: int = 0) -> DecoderShape:
    """The ropes, the scale of the embedding, the cap of the logits and the per-layer inputs, if they have a size.
    `head_dim`: of layers without a window, if it is another than that of the others."""
    assert info.local_rope is not None, "the config of these families has a rope per kind of layer"
    ropes = (RopeShape(info.rope, head_dim or info.head_dim), RopeShape(info.local_rope, info.head_dim, switches=False))
    inputs = None
    if input_size:
        vocab_size = needed_number(info, "vocab_size_per_layer_input")
        inputs = LayerInputsShape(vocab_size=vocab_size, num_layers=info.num_layers, size=input_size)
    return replace(
        shape,
        ropes=ropes,
        layer_inputs=inputs,
        logit_cap=float(info.extra.get("final_logit_softcapping") or 0.0),
        embedding_scale=math.sqrt(info.hidden_size),
    )


def kv_sources(info: ModelInfo, windows: Sequence[int]) -> list[int | None]:
    """For each layer, the layer whose keys and values it reads. The last `num_kv_shared_layers` read those of the last
    layer before them that has a window too, or has none either."""
    num_shared = int(info.extra.get("num_kv_shared_layers") or 0)
    first = info.num_layers - num_shared
    if not 0 < first <= info.num_layers:
        raise BadCheckpoint(
            f"config.json shares the KV cache of {num_shared} (num_kv_shared_layers) of {info.num_layers} layers"
        )
    sources: list[int | None] = [None] * info.num_layers
    for layer in range(first, info.num_layers):
        alike = [other for other in range(first) if bool(windows[other]) == bool(windows[layer])]
        if not alike:
            raise BadCheckpoint(
                f"config.json shares the KV cache of the last {num_shared} layers (num_kv_shared_layers), "
                f"but no layer before them is of the kind of layer {layer}"
            )
        sources[layer] = alike[-1]
    return sources


def gemma3n_rules(shape: DecoderShape, roots: Sequence[str] = ("model", "")) -> Rules:
    names = unused_sources(shape) | GEMMA_NORMS | LAYER_INPUT_NAMES | _ALTUP_NAMES
    return llama_rules(shape, names, roots)


def gemma3n_text_rules(shape: DecoderShape) -> Rules:
    """For checkpoints with image and audio encoders, which are left out."""
    return other_modalities(shape) | gemma3n_rules(shape, ("model.language_model", "language_model.model"))


def unused_sources(shape: DecoderShape) -> dict[str, str | None]:
    """Published checkpoints have keys, values and their norms also in layers that share those of others."""
    shared = [number for number, layer in enumerate(shape.layers) if layer.stores_nothing]
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return {f"model.layers.{number}.self_attn.{part}.weight": None for number in shared for part in parts}


def other_modalities(shape: DecoderShape) -> Rules:
    parts = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector")
    others: dict[str, str | None] = {f"{root}{part}.*": None for root in ("", "model.") for part in parts}
    return Rules(others | {"language_model.lm_head.{kind}": None if shape.tied else "head.{kind}"})


def _by_layer(info: ModelInfo, name: str, usual: Any) -> list[Any]:
    """A fact that config.json gives for each layer, or once for all."""
    given = info.extra.get(name)
    given = usual if given is None else given
    each = list(given)[: info.num_layers] if isinstance(given, list) else [given] * info.num_layers
    if len(each) != info.num_layers:
        raise BadCheckpoint(f"{name} of config.json has {len(each)} values for {info.num_layers} layers")
    return each


# Gemma 4, text part: other heads in layers without a window, keys that are values, per-layer inputs, experts, and
# trailing layers that share KV caches. What a model does not have its config.json sets to 0 or leaves out.

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
