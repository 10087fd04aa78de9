"""Gemma 3n, text part: AltUp streams, Laurel, per-layer inputs, sparse gates, trailing layers that share KV caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape, RopeShape
from slipstream.nn.models.gemma import GEMMA_NORMS
from slipstream.nn.models.llama import llama_attention, llama_mlp, llama_rules, llama_shape
from slipstream.nn.models.moe import needed_number
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.shapes import AltUpShape, LayerInputShape, LayerInputsShape
from slipstream.nn.weights.rules import Rules

LAYER_INPUT_NAMES: dict[str, str | None] = {
    "model.embed_tokens_per_layer.weight": "layer_inputs.embedding.weight",
    "model.per_layer_model_projection.weight": "layer_inputs.projection.weight",
    "model.per_layer_projection_norm.weight": "layer_inputs.norm.weight",
    "model.layers.{n}.per_layer_input_gate.weight": "layers.{n}.layer_input.gate.weight",
    "model.layers.{n}.per_layer_projection.weight": "layers.{n}.layer_input.projection.weight",
    "model.layers.{n}.post_per_layer_input_norm.weight": "layers.{n}.layer_input_out_norm.weight",
}
_ALTUP_NAMES: dict[str, str | None] = {
    "model.altup_projections.{i}.weight": "streams.into.{i}.weight",
    "model.altup_unembed_projections.{i}.weight": "streams.out_of.{i}.weight",
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
    num_streams, active = needed_number(info, "altup_num_inputs"), int(info.extra.get("altup_active_idx", 0))
    if num_streams < 2:
        raise UnsupportedModel(f"{info.architecture}: altup_num_inputs is {num_streams}; 2 or more streams are run")
    if not 0 <= active < num_streams:
        raise BadCheckpoint(
            f"config.json of {info.architecture} has a wrong value: altup_active_idx is {active}, and there are "
            f"{num_streams} streams (altup_num_inputs), counted from 0"
        )
    return AltUpShape(
        num_streams=num_streams,
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
