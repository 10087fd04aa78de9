"""MPNet: RoBERTa's, with a bias in attention for each distance, and names of its own."""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.bert import ROBERTA_CLASSES, ROBERTA_WORDS, bert_shape, encoder_rules
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.weights.rules import Rules


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
