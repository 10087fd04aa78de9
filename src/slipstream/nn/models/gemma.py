"""The Gemma family: Gemma 1, Gemma 2 and the text part of Gemma 3.

Norms are stored as weight - 1, embeddings are scaled. From Gemma 2 on: norms after sublayers too, layers with and
without a window. Gemma 2 caps scores and logits; Gemma 3 norms queries and keys, and its window layers have another
rope base.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_rules, llama_shape, with_local_rope
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.shapes import NormShape
from slipstream.nn.weights.rules import Rules


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
