"""The BERT family: BERT, RoBERTa, XLM-RoBERTa and DistilBERT. Positions are learned, sums are normed.

RoBERTa's positions begin behind the pad token's number; DistilBERT has no token types and names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.model_info import STATIC_TENSORS, ModelInfo, family_name
from slipstream.nn.encoder import EncoderShape
from slipstream.nn.pooling_heads import HeadShape
from slipstream.nn.weights.source import Rules

RELATIVE: dict[str, Literal["", "queries", "queries and keys"]] = {
    "absolute": "",
    "relative_key": "queries",
    "relative_key_query": "queries and keys",
}
_WITH_RELATIVE = frozenset(("Bert", "HF_ColBERT", "Roberta", "XLMRoberta", "Camembert"))


def bert_shape(info: ModelInfo) -> EncoderShape:
    """Also what every other family begins with."""
    kind = info.extra.get("position_embedding_type") or "absolute"
    relative = RELATIVE.get(kind)
    if relative is None or (relative and family_name(info.architecture) not in _WITH_RELATIVE):
        known = [name for name, found in RELATIVE.items() if not found or relative is None]
        raise UnsupportedModel(
            f"{info.architecture} with positions of kind {kind} is not supported; {', '.join(known)} is"
        )
    if info.extra.get("is_decoder"):
        raise UnsupportedModel(
            f"{info.architecture} with is_decoder attends to earlier tokens only, which is not supported for encoders; "
            "remove it if the model was trained to see the whole text"
        )
    return EncoderShape(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        num_layers=info.num_layers,
        num_heads=info.num_heads,
        head_dim=info.head_dim,
        ffn_size=info.ffn_size,
        activation=info.activation,
        norm_eps=info.norm_eps,
        max_positions=info.max_positions,
        position_offset=info.position_offset,
        num_types=info.num_types,
        relative=relative,
    )


def static_shape(info: ModelInfo) -> EncoderShape:
    """An embedding without layers, of which sentence-transformers takes the mean (StaticEmbedding)."""
    return replace(bert_shape(info), position_offset=None, embedding_norm=False)


def static_rules(info: ModelInfo) -> Rules:
    return Rules(dict.fromkeys(STATIC_TENSORS, "embedding.weight"))


def bert_heads(info: ModelInfo) -> HeadShape:
    """The first token through a layer with tanh, then the classes."""
    kind = info.architecture
    if kind.endswith("ForSequenceClassification"):
        return HeadShape(classifier_bias=True, transform="tanh")
    return plain_heads(info)


def plain_heads(info: ModelInfo) -> HeadShape:
    """The heads that all families share: classes of tokens, words, projections of tokens; text classifiers differ."""
    kind = info.architecture
    if kind.endswith("ForTokenClassification"):
        return HeadShape(classifier_bias=True)
    if kind.endswith("ForMaskedLM"):
        return HeadShape(vocabulary=True, transform=info.activation, norm_eps=info.norm_eps)
    return HeadShape(token_bias=False if kind == "HF_ColBERT" else None)


_EMBEDDINGS: dict[str, str | None] = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions.weight",
    "embeddings.token_type_embeddings.weight": "types.weight",
    "embeddings.LayerNorm.{kind}": "embedding_norm.{kind}",
    "embeddings.position_ids": None,
}
BERT_NAMES: dict[str, str | None] = {
    **_EMBEDDINGS,
    "encoder.layer.{n}.attention.self.query.{kind}": "layers.{n}.attention.qkv.q.{kind}",
    "encoder.layer.{n}.attention.self.key.{kind}": "layers.{n}.attention.qkv.k.{kind}",
    "encoder.layer.{n}.attention.self.value.{kind}": "layers.{n}.attention.qkv.v.{kind}",
    "encoder.layer.{n}.attention.output.dense.{kind}": "layers.{n}.attention.output.{kind}",
    "encoder.layer.{n}.attention.output.LayerNorm.{kind}": "layers.{n}.attention_norm.{kind}",
    "encoder.layer.{n}.intermediate.dense.{kind}": "layers.{n}.mlp.up.{kind}",
    "encoder.layer.{n}.output.dense.{kind}": "layers.{n}.mlp.down.{kind}",
    "encoder.layer.{n}.output.LayerNorm.{kind}": "layers.{n}.mlp_norm.{kind}",
}
BERT_WORDS: dict[str, str | None] = {
    "cls.predictions.transform.dense.{kind}": "heads.transform.dense.{kind}",
    "cls.predictions.transform.LayerNorm.{kind}": "heads.transform.norm.{kind}",
    "cls.predictions.bias": "heads.vocabulary_bias.bias",
    "cls.*": None,  # the tied embedding, and the head for next-sentence prediction
}
ROBERTA_WORDS: dict[str, str | None] = {
    "lm_head.dense.{kind}": "heads.transform.dense.{kind}",
    "lm_head.layer_norm.{kind}": "heads.transform.norm.{kind}",
    "lm_head.bias": "heads.vocabulary_bias.bias",
    "lm_head.decoder.*": None,
}
_DISTILBERT: dict[str, str | None] = {
    **_EMBEDDINGS,
    "transformer.layer.{n}.attention.out_lin.{kind}": "layers.{n}.attention.output.{kind}",
    "transformer.layer.{n}.attention.{part}_lin.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
    "transformer.layer.{n}.sa_layer_norm.{kind}": "layers.{n}.attention_norm.{kind}",
    "transformer.layer.{n}.ffn.lin1.{kind}": "layers.{n}.mlp.up.{kind}",
    "transformer.layer.{n}.ffn.lin2.{kind}": "layers.{n}.mlp.down.{kind}",
    "transformer.layer.{n}.output_layer_norm.{kind}": "layers.{n}.mlp_norm.{kind}",
}


def encoder_rules(
    names: Mapping[str, str | None], roots: Sequence[str], heads: Mapping[str, str | None] | None = None
) -> Rules:
    """Rules for a family's own names, with each of the roots that its checkpoints may begin them with, or none.

    Early checkpoints call a norm's weight and bias gamma and beta.
    """
    rooted: dict[str, str | None] = {}
    for root in ("", *(f"{root}." for root in roots)):
        for theirs, ours in names.items():
            if ours is not None and "norm" in ours:
                for old, new in (("gamma", "weight"), ("beta", "bias")):
                    rooted[root + theirs.format_map(_Kind(old))] = ours.format_map(_Kind(new))
            rooted[root + theirs] = ours
    return Rules({**(heads or {}), **rooted})


class _Kind(dict[str, str]):
    """Fills in `kind` alone."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind=kind)

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


def pooled_names(info: ModelInfo) -> dict[str, str | None]:
    """Names of the tensors of the pooler, which only a classifier of whole texts uses, and of that classifier."""
    pooled = "heads.transform.dense.{kind}" if info.architecture.endswith("ForSequenceClassification") else None
    return {
        "{root}.pooler.dense.{kind}": pooled,
        "pooler.dense.{kind}": pooled,
        "classifier.{kind}": "heads.classifier.{kind}",
    }


def bert_rules(info: ModelInfo) -> Rules:
    heads = pooled_names(info) | {"linear.{kind}": "heads.token.{kind}"} | BERT_WORDS
    return encoder_rules(_names(info), ("bert", "model"), heads)


def roberta_rules(info: ModelInfo) -> Rules:
    return encoder_rules(_names(info), ("roberta", "model"), ROBERTA_CLASSES | ROBERTA_WORDS)


def _names(info: ModelInfo) -> dict[str, str | None]:
    if not RELATIVE.get(info.extra.get("position_embedding_type") or "absolute"):
        return BERT_NAMES
    distances = "encoder.layer.{n}.attention.self.distance_embedding.weight"
    # the table of positions is there all the same, and nothing reads it
    return BERT_NAMES | {
        distances: "layers.{n}.attention.relative.weight",
        "embeddings.position_embeddings.weight": None,
    }


ROBERTA_CLASSES: dict[str, str | None] = {
    "classifier.dense.{kind}": "heads.transform.dense.{kind}",
    "classifier.out_proj.{kind}": "heads.classifier.{kind}",
    "classifier.{kind}": "heads.classifier.{kind}",
    "{root}.pooler.*": None,
    "pooler.*": None,
}


def distilbert_heads(info: ModelInfo) -> HeadShape:
    if info.architecture.endswith("ForSequenceClassification"):
        return HeadShape(classifier_bias=True, transform="relu")
    return plain_heads(info)


def distilbert_rules(info: ModelInfo) -> Rules:
    heads = {
        "pre_classifier.{kind}": "heads.transform.dense.{kind}",
        "classifier.{kind}": "heads.classifier.{kind}",
        "vocab_transform.{kind}": "heads.transform.dense.{kind}",
        "vocab_layer_norm.{kind}": "heads.transform.norm.{kind}",
        "vocab_projector.bias": "heads.vocabulary_bias.bias",
        "vocab_projector.weight": None,
    }
    return encoder_rules(_DISTILBERT, ("distilbert",), heads)


# MPNet: RoBERTa's, with a bias in attention for each distance, and names of its own.


def mpnet_shape(info: ModelInfo) -> EncoderShape:
    num_buckets = int(info.extra.get("relative_attention_num_buckets", 32))
    if num_buckets < 4:  # half of them for each side, half of those for single distances
        raise BadCheckpoint(f"relative_attention_num_buckets of config.json is {num_buckets}; it must be 4 or more")
    return replace(bert_shape(info), num_buckets=num_buckets)


_MPNET: dict[str, str | None] = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions.weight",
    "embeddings.LayerNorm.{kind}": "embedding_norm.{kind}",
    "embeddings.position_ids": None,
    "encoder.relative_attention_bias.weight": "distances.weight",
    "encoder.layer.{n}.attention.attn.o.{kind}": "layers.{n}.attention.output.{kind}",
    "encoder.layer.{n}.attention.attn.{part}.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
    "encoder.layer.{n}.attention.LayerNorm.{kind}": "layers.{n}.attention_norm.{kind}",
    "encoder.layer.{n}.intermediate.dense.{kind}": "layers.{n}.mlp.up.{kind}",
    "encoder.layer.{n}.output.dense.{kind}": "layers.{n}.mlp.down.{kind}",
    "encoder.layer.{n}.output.LayerNorm.{kind}": "layers.{n}.mlp_norm.{kind}",
}


def mpnet_rules(info: ModelInfo) -> Rules:
    return encoder_rules(_MPNET, ("mpnet",), ROBERTA_CLASSES | ROBERTA_WORDS)


# BERT with smaller embeddings: ELECTRA, and ALBERT, whose layers share their weights.


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


# XLM-RoBERTa-XL: RoBERTa with norms before attention and MLP, and none of the embedding.


def xlm_roberta_xl_shape(info: ModelInfo) -> EncoderShape:
    return replace(bert_shape(info), embedding_norm=False, norm_before=True)


def xlm_roberta_xl_rules(info: ModelInfo) -> Rules:
    names = BERT_NAMES | {
        "encoder.layer.{n}.attention.self_attn_layer_norm.{kind}": "layers.{n}.attention_norm.{kind}",
        "encoder.layer.{n}.LayerNorm.{kind}": "layers.{n}.mlp_norm.{kind}",
        "encoder.LayerNorm.{kind}": "norm.{kind}",
    }
    return encoder_rules(names, ("roberta",), ROBERTA_CLASSES | ROBERTA_WORDS)
