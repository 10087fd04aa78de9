"""DeBERTa-v2 and v3: attention that compares tokens with distances (`nn/layers/position_embedding.py`)."""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.encoder import EncoderShape
from slipstream.nn.families.bert import BERT_NAMES, BERT_WORDS, bert_shape, encoder_rules, plain_heads
from slipstream.nn.layers.position_embedding import DisentangledShape
from slipstream.nn.pooling_heads import HeadShape
from slipstream.nn.weights.source import Rules


def deberta_shape(info: ModelInfo) -> EncoderShape:
    extra = info.extra
    kinds = extra.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not extra.get("relative_attention") or {*kinds} != {"c2p", "p2c"} or not extra.get("share_att_key"):
        raise UnsupportedModel(
            f"{info.architecture} is supported with relative_attention, pos_att_type c2p|p2c and share_att_key, as in "
            "DeBERTa-v3; its config.json says otherwise"
        )
    if int(extra.get("conv_kernel_size") or 0) > 0:
        raise UnsupportedModel(
            f"{info.architecture} with a convolution (conv_kernel_size) is not supported; DeBERTa-v3 has none"
        )
    if int(extra.get("embedding_size") or info.hidden_size) != info.hidden_size:
        raise UnsupportedModel(f"{info.architecture} with embeddings of another size than the layers is not supported")
    normed = "layer_norm" in str(extra.get("norm_rel_ebd") or "none").lower()
    furthest = int(extra.get("max_relative_positions") or -1)
    buckets = max(int(extra.get("position_buckets") or 0), 0)
    distance = furthest if furthest > 0 else info.max_positions
    if buckets and distance <= buckets // 2 + 1:
        raise ValueError(f"the largest distance is {distance}, no more than half of the {buckets} position_buckets")
    return replace(
        bert_shape(info),
        position_offset=0 if extra.get("position_biased_input", True) else None,
        scale=(3 * info.head_dim) ** -0.5,  # three terms are summed
        disentangled=DisentangledShape(
            num_buckets=buckets,
            max_distance=distance,
            norm_eps=info.norm_eps if normed else None,
        ),
    )


def deberta_heads(info: ModelInfo) -> HeadShape:
    if info.architecture.endswith("ForSequenceClassification"):
        return HeadShape(classifier_bias=True, transform=str(info.extra.get("pooler_hidden_act") or "gelu"))
    if info.architecture.endswith("ForMaskedLM") and info.extra.get("legacy") is False:
        raise UnsupportedModel(f"{info.architecture} with legacy = false is not supported; set the task to embed")
    return plain_heads(info)


def deberta_rules(info: ModelInfo) -> Rules:
    names: dict[str, str | None] = {
        f"encoder.layer.{{n}}.attention.self.{name}_proj.{{kind}}": f"layers.{{n}}.attention.qkv.{name[0]}.{{kind}}"
        for name in ("query", "key", "value")
    }
    names |= {
        "encoder.rel_embeddings.weight": "relative.weight",
        "encoder.LayerNorm.{kind}": "relative.norm.{kind}",
    }
    heads: dict[str, str | None] = {
        "pooler.dense.{kind}": (
            "heads.transform.dense.{kind}" if info.architecture.endswith("ForSequenceClassification") else None
        ),
        "classifier.{kind}": "heads.classifier.{kind}",
        "lm_predictions.*": None,
        "mask_predictions.*": None,
    }
    return encoder_rules(BERT_NAMES | names, ("deberta",), heads | BERT_WORDS)


# The encoder of T5 (sentence-t5, gtr): RMS norms before, a bias by distance, no biases, unscaled scores.


def t5_shape(info: ModelInfo) -> EncoderShape:
    extra = info.extra
    num_buckets = int(extra.get("relative_attention_num_buckets", 32))
    if num_buckets < 4:
        raise BadCheckpoint(f"relative_attention_num_buckets of config.json is {num_buckets}; it must be 4 or more")
    *gated, activation = str(extra.get("feed_forward_proj") or "relu").split("-")
    # the name in configs; the published models have the approximation by tanh
    activation = "gelu_new" if gated and activation == "gelu" else activation
    return replace(
        bert_shape(info),
        activation=activation,
        gate="parts" if gated else "none",
        position_offset=None,
        embedding_norm=False,
        norm_before=True,
        norm_kind="rms",
        num_buckets=num_buckets,
        max_distance=int(extra.get("relative_attention_max_distance", 128)),
        scale=1.0,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        down_bias=False,
    )


def t5_heads(info: ModelInfo) -> HeadShape:
    return HeadShape()


_BLOCK = "encoder.block.{n}.layer."
_T5: dict[str, str | None] = {
    "shared.weight": "embedding.weight",
    "encoder.embed_tokens.weight": None,  # the same
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "distances.weight",
    f"{_BLOCK}0.SelfAttention.o.weight": "layers.{n}.attention.output.weight",
    f"{_BLOCK}0.SelfAttention.{{part}}.weight": "layers.{n}.attention.qkv.{part}.weight",
    f"{_BLOCK}0.layer_norm.weight": "layers.{n}.attention_norm.weight",
    f"{_BLOCK}1.DenseReluDense.wi.weight": "layers.{n}.mlp.up.weight",
    f"{_BLOCK}1.DenseReluDense.wi_0.weight": "layers.{n}.mlp.gate_up.gate.weight",
    f"{_BLOCK}1.DenseReluDense.wi_1.weight": "layers.{n}.mlp.gate_up.up.weight",
    f"{_BLOCK}1.DenseReluDense.wo.weight": "layers.{n}.mlp.down.weight",
    f"{_BLOCK}1.layer_norm.weight": "layers.{n}.mlp_norm.weight",
    "encoder.final_layer_norm.weight": "norm.weight",
    "decoder.*": None,
    "lm_head.weight": None,
}


def t5_rules(info: ModelInfo) -> Rules:
    return encoder_rules(_T5, ())
