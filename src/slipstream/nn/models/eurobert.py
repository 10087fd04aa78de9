"""EuroBERT: Llama's layers, in which every token sees the whole text, with heads of an encoder."""

from __future__ import annotations

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_rules
from slipstream.nn.models.pooling_heads import HeadShape
from slipstream.nn.weights.rules import Rules


def eurobert_heads(info: ModelInfo) -> HeadShape:
    kind = info.architecture
    if kind.endswith("ForSequenceClassification"):
        pooling = info.extra.get("classifier_pooling", "late")
        if pooling not in ("bos", "mean"):
            raise UnsupportedModel(
                f"{kind} with classifier_pooling {pooling} is not supported: scores of tokens are not averaged; bos "
                "and mean are"
            )
        return HeadShape(classifier_bias=True, transform="gelu")
    if kind.endswith("ForMaskedLM"):
        raise UnsupportedModel(f"{kind}: weights of words by its head are not supported; set the task to embed")
    return HeadShape(classifier_bias=True) if kind.endswith("ForTokenClassification") else HeadShape()


def eurobert_rules(shape: DecoderShape) -> Rules:
    names = {"dense.{kind}": "heads.transform.dense.{kind}", "classifier.{kind}": "heads.classifier.{kind}"}
    return Rules({**names, "lm_head.*": None}) | llama_rules(shape)
