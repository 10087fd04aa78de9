"""The Gemma family: Gemma 2 and the text of Gemma 3.

Norms before and after, stored as their distance from 1; scaled embeddings; layers with a window between full ones.
Gemma 2 bounds scores and logits; Gemma 3 norms queries and keys and turns the positions of window layers by a base of
their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from slipstream.config.model_info import ModelInfo
from slipstream.errors import BadCheckpoint
from slipstream.nn.models.decoder import DecoderShape
from slipstream.nn.models.llama import llama_rules, llama_shape
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.weights.rules import Rules


def gemma2_shape(info: ModelInfo) -> DecoderShape:
    """Every second layer is full, beginning with the second."""
    return replace(
        _gemma_shape(info, pattern=2),
        score_cap=float(info.extra.get("attn_logit_softcapping") or 0.0),
    )


def gemma3_shape(info: ModelInfo) -> DecoderShape:
    """Mostly every sixth layer is full."""
    return replace(
        _gemma_shape(info, pattern=info.extra.get("sliding_window_pattern") or 6),
        qk_norm="heads",
        local_rope=info.local_rope,
    )


def _gemma_shape(info: ModelInfo, pattern: int) -> DecoderShape:
    extra = info.extra
    scalar = float(extra.get("query_pre_attn_scalar") or 256)
    if not 0 < scalar < math.inf:
        raise BadCheckpoint(f"query_pre_attn_scalar of config.json is {scalar}; it must be over 0")
    windows = layer_windows(info, lambda layer: (layer + 1) % pattern != 0)
    if not info.is_causal:
        windows = tuple(window // 2 for window in windows)  # to each side
    return replace(
        llama_shape(info),
        norm_after=True,
        norm_offset=1.0,
        scale=scalar**-0.5,
        logit_cap=float(extra.get("final_logit_softcapping") or 0.0),
        embedding_scale=math.sqrt(info.hidden_size),
        windows=windows,
    )


_NORMS: dict[str, str | None] = {
    "model.layers.{n}.post_attention_layernorm.weight": "layers.{n}.attention_out_norm.weight",
    "model.layers.{n}.pre_feedforward_layernorm.weight": "layers.{n}.mlp_norm.weight",
    "model.layers.{n}.post_feedforward_layernorm.weight": "layers.{n}.mlp_out_norm.weight",
}


def gemma_rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, _NORMS)


def gemma_text_rules(shape: DecoderShape) -> Rules:
    """Of a checkpoint that also sees pictures: its text part, as older and newer releases name it."""
    parts = ("vision_tower", "multi_modal_projector")
    pictures = {f"{root}{part}.*": None for root in ("", "model.") for part in parts}
    text = llama_rules(shape, _NORMS, roots=("language_model.model", "model.language_model"))
    head = {"language_model.lm_head.weight": None if shape.tied else "head.weight"}
    return Rules(pictures | head) | text
