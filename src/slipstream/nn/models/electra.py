"""BERT with smaller embeddings: ELECTRA, and ALBERT, whose layers share their weights."""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.bert import BERT_NAMES, ROBERTA_CLASSES, bert_shape, encoder_rules, plain_heads
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.models.pooling_heads import HeadShape
from slipstream.nn.weights.rules import Rules


def electra_shape(info: ModelInfo) -> EncoderShape:
    size = int(info.extra.get("embedding_size") or info.hidden_size)
    is_smaller = size != info.hidden_size
    return replace(bert_shape(info), embedding_size=size, projection="after norm" if is_smaller else "none")


def electra_heads(info: ModelInfo) -> HeadShape:
    if info.architecture.endswith("ForSequenceClassification"):
        return HeadShape(classifier_bias=True, transform="gelu")
    return small_heads(info)


def small_heads(info: ModelInfo) -> HeadShape:
    """Refuses words: the layer before the vocabulary has the size of the embedding."""
    if info.architecture.endswith("ForMaskedLM"):
        raise UnsupportedModel(
            f"{info.architecture}: weights of words through embeddings of another size are not supported; set the task "
            "to embed"
        )
    return plain_heads(info)


def electra_rules(info: ModelInfo) -> Rules:
    names = BERT_NAMES | {"embeddings_project.{kind}": "projection.{kind}"}
    words: dict[str, str | None] = {"generator_*": None, "discriminator_predictions.*": None}
    return encoder_rules(names, ("electra",), ROBERTA_CLASSES | words)


def albert_shape(info: ModelInfo) -> EncoderShape:
    for name in ("num_hidden_groups", "inner_group_num"):
        if int(info.extra.get(name, 1)) != 1:
            raise UnsupportedModel(f"{info.architecture} with {name} {info.extra[name]} is not supported; 1 is")
    size = int(info.extra.get("embedding_size") or 128)
    return replace(bert_shape(info), embedding_size=size, projection="after norm", shares_layers=True)


def albert_heads(info: ModelInfo) -> HeadShape:
    if info.architecture.endswith("ForSequenceClassification"):
        return HeadShape(classifier_bias=True, transform="tanh")
    return small_heads(info)


_LAYER = "encoder.albert_layer_groups.0.albert_layers.0."
_ALBERT: dict[str, str | None] = {
    **{stored: name for stored, name in BERT_NAMES.items() if not stored.startswith("encoder.")},
    "encoder.embedding_hidden_mapping_in.{kind}": "projection.{kind}",
    f"{_LAYER}attention.query.{{kind}}": "layers.0.attention.qkv.q.{kind}",
    f"{_LAYER}attention.key.{{kind}}": "layers.0.attention.qkv.k.{kind}",
    f"{_LAYER}attention.value.{{kind}}": "layers.0.attention.qkv.v.{kind}",
    f"{_LAYER}attention.dense.{{kind}}": "layers.0.attention.output.{kind}",
    f"{_LAYER}attention.LayerNorm.{{kind}}": "layers.0.attention_norm.{kind}",
    f"{_LAYER}ffn.{{kind}}": "layers.0.mlp.up.{kind}",
    f"{_LAYER}ffn_output.{{kind}}": "layers.0.mlp.down.{kind}",
    f"{_LAYER}full_layer_layer_norm.{{kind}}": "layers.0.mlp_norm.{kind}",
}


def albert_rules(info: ModelInfo) -> Rules:
    pooled = "heads.transform.dense.{kind}" if info.architecture.endswith("ForSequenceClassification") else None
    heads: dict[str, str | None] = {
        "albert.pooler.{kind}": pooled,
        "pooler.{kind}": pooled,
        "classifier.{kind}": "heads.classifier.{kind}",
        "predictions.*": None,
        "sop_classifier.*": None,
    }
    return encoder_rules(_ALBERT, ("albert",), heads)
