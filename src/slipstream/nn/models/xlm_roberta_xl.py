"""XLM-RoBERTa-XL: RoBERTa with norms before attention and MLP, and none of the embedding."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.bert import BERT_NAMES, ROBERTA_CLASSES, ROBERTA_WORDS, bert_shape, encoder_rules
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.weights.rules import Rules


def xlm_roberta_xl_shape(info: ModelInfo) -> EncoderShape:
    return replace(bert_shape(info), embedding_norm=False, norm_before=True)


def xlm_roberta_xl_rules(info: ModelInfo) -> Rules:
    names = BERT_NAMES | {
        "encoder.layer.{n}.attention.self_attn_layer_norm.{kind}": "layers.{n}.attention_norm.{kind}",
        "encoder.layer.{n}.LayerNorm.{kind}": "layers.{n}.mlp_norm.{kind}",
        "encoder.LayerNorm.{kind}": "norm.{kind}",
    }
    return encoder_rules(names, ("roberta",), ROBERTA_CLASSES | ROBERTA_WORDS)
