"""The Llama family: Llama 2 and 3, SmolLM2, Mistral and all that share their architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipstream.config.model_info import ModelInfo
from slipstream.nn.models.decoder import DecoderShape
from slipstream.nn.weights.rules import Rules


def llama_shape(info: ModelInfo) -> DecoderShape:
    """Also what every other family begins with."""
    return DecoderShape(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        num_layers=info.num_layers,
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        ffn_size=info.ffn_size,
        activation=info.activation,
        norm_eps=info.norm_eps,
        rope=info.rope,
        max_positions=info.max_positions,
        tied=info.tied_embeddings,
        qkv_bias=info.attention_bias,
        output_bias=info.attention_bias,
        mlp_bias=info.mlp_bias,
    )


def mistral_shape(info: ModelInfo) -> DecoderShape:
    """Llama's; early releases attend within a window in every layer, later ones say null."""
    window = info.extra.get("sliding_window") or 0
    return replace(llama_shape(info), windows=(int(window),) * info.num_layers)


def llama_rules(
    shape: DecoderShape, others: Mapping[str, str | None] | None = None, roots: Sequence[str] = ("model", "")
) -> Rules:
    """Of every family that names its tensors the same way; `others` are a family's own, and count first.

    `roots` are what its checkpoints may write in place of the leading "model"; embedders are often without.
    """
    names: dict[str, str | None] = {
        **(others or {}),
        "model.embed_tokens.weight": "embedding.weight",
        "model.norm.weight": "norm.weight",
        # some tied checkpoints carry it all the same
        "lm_head.weight": None if shape.tied or shape.headless else "head.weight",
        "score.0.{kind}": "heads.transform.dense.{kind}",
        "score.2.{kind}": "heads.classifier.{kind}",
        "score.{kind}": "heads.classifier.{kind}",
        "model.layers.{n}.input_layernorm.weight": "layers.{n}.attention_norm.weight",
        "model.layers.{n}.post_attention_layernorm.weight": "layers.{n}.mlp_norm.weight",
        "model.layers.{n}.self_attn.o_proj.{kind}": "layers.{n}.attention.output.{kind}",
        "model.layers.{n}.self_attn.{part}_proj.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
        "model.layers.{n}.self_attn.{part}_norm.weight": "layers.{n}.attention.norm.{part}.weight",
        "model.layers.{n}.mlp.down_proj.{kind}": "layers.{n}.mlp.down.{kind}",
        "model.layers.{n}.mlp.{part}_proj.{kind}": "layers.{n}.mlp.gate_up.{part}.{kind}",
        "model.layers.{n}.self_attn.rotary_emb.inv_freq": None,  # old checkpoints; we compute it
    }
    names |= others or {}
    rooted: dict[str, str | None] = {}
    for root in roots:
        for name, place in names.items():
            rooted[name.replace("model", root, 1).removeprefix(".")] = place
    return Rules(rooted)
