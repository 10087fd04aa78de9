"""ModernBERT: rotary positions, norms before, gated feed-forwards without biases; most layers see a window."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.bert import bert_shape, encoder_rules
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.models.pooling_heads import HeadShape
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.weights.rules import Rules


def modernbert_shape(info: ModelInfo) -> EncoderShape:
    extra = info.extra
    every = int(extra["global_attn_every_n_layers"])
    sides = int(extra["local_attention"]) // 2  # the config counts both
    known = msgspec.structs.replace(info, extra=extra | {"sliding_window": sides})
    return replace(
        bert_shape(info),
        position_offset=None,
        rope=info.rope,
        local_rope=info.local_rope,
        reaches=layer_windows(known, lambda layer: layer % every != 0),
        norm_before=True,
        norm_bias=bool(extra.get("norm_bias", False)),
        fused=True,
        gate="fused",
        qkv_bias=info.attention_bias,
        output_bias=info.attention_bias,
        mlp_bias=info.mlp_bias,
        down_bias=info.mlp_bias,
    )


def modernbert_heads(info: ModelInfo) -> HeadShape:
    """The same layer before classes of texts, of tokens, and words."""
    extra, kind = info.extra, info.architecture
    common = HeadShape(
        transform=str(extra.get("classifier_activation", "gelu")),
        transform_bias=bool(extra.get("classifier_bias", False)),
        norm_eps=info.norm_eps,
        norm_bias=bool(extra.get("norm_bias", False)),
    )
    if kind.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return replace(common, classifier_bias=True)
    if kind.endswith("ForMaskedLM"):
        return replace(common, vocabulary=True)
    return HeadShape()


_MODERNBERT: dict[str, str | None] = {
    "embeddings.tok_embeddings.weight": "embedding.weight",
    "embeddings.norm.{kind}": "embedding_norm.{kind}",
    "layers.{n}.attn_norm.{kind}": "layers.{n}.attention_norm.{kind}",
    "layers.{n}.attn.Wqkv.{kind}": "layers.{n}.attention.qkv.{kind}",
    "layers.{n}.attn.Wo.{kind}": "layers.{n}.attention.output.{kind}",
    "layers.{n}.mlp_norm.{kind}": "layers.{n}.mlp_norm.{kind}",
    "layers.{n}.mlp.Wi.{kind}": "layers.{n}.mlp.gate_up.{kind}",
    "layers.{n}.mlp.Wo.{kind}": "layers.{n}.mlp.down.{kind}",
    "final_norm.{kind}": "norm.{kind}",
}


def modernbert_rules(info: ModelInfo) -> Rules:
    heads = {
        "head.{part}.{kind}": "heads.transform.{part}.{kind}",
        "classifier.{kind}": "heads.classifier.{kind}",
        "decoder.bias": "heads.vocabulary_bias.bias",
        "decoder.weight": None,
    }
    return encoder_rules(_MODERNBERT, ("model",), heads)
