"""Command R (Cohere) and Command A (Cohere2): attention and MLP side by side behind one layer norm, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_shape
from slipstream.nn.models.llama_variants import with_rope_in
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.shapes import NormShape


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
