"""JinaBERT v2 (jina-embeddings-v2): BERT without positions, scores that decrease with the distance, gated MLPs.

The model of code (jina-bert-v2-qk-post-norm) also norms queries and keys, and the sum of attention and its input twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.bert import BERT_NAMES, BERT_WORDS, bert_shape, encoder_rules, pooled_names
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.weights.rules import Rules

_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}


def jina_bert_shape(info: ModelInfo) -> EncoderShape:
    extra = info.extra
    kind = extra.get("position_embedding_type", "alibi")
    if kind != "alibi":
        raise UnsupportedModel(f"{info.architecture} with positions of kind {kind} is not supported; alibi is")
    feed = extra.get("feed_forward_type", "geglu")
    if feed not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{info.architecture} with feed_forward_type {feed} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    norms_queries = _norms_queries(info)
    stored: Literal["fused", "up first"] = "up first" if norms_queries else "fused"
    plain = msgspec.structs.replace(info, extra=extra | {"position_embedding_type": "absolute"})
    return replace(
        bert_shape(plain),
        activation=_ACTIVATIONS[feed],
        position_offset=None,
        alibi=True,
        qk_norm=norms_queries,
        sums_twice=norms_queries,
        gate="parts" if extra.get("gate_apart") else stored,
        mlp_bias=False,
    )


def _norms_queries(info: ModelInfo) -> bool:
    """config.json names the code that the model was published with; a GGUF file has the tensors of the norms."""
    return bool(info.extra.get("qk_post_norm")) or "qk-post-norm" in str(info.extra.get("auto_map"))


def jina_bert_rules(info: ModelInfo) -> Rules:
    layer, ours = "encoder.layer.{n}.", "layers.{n}."
    names = BERT_NAMES | {
        f"{layer}mlp.gated_layers.weight": f"{ours}mlp.gate_up.weight",
        f"{layer}mlp.up_gated_layer.weight": f"{ours}mlp.gate_up.weight",
        f"{layer}mlp.wo.{{kind}}": f"{ours}mlp.down.{{kind}}",
        f"{layer}mlp.down_layer.{{kind}}": f"{ours}mlp.down.{{kind}}",
        f"{layer}mlp.layernorm.{{kind}}": f"{ours}mlp_norm.{{kind}}",
        f"{layer}attention.self.layer_norm_{{part}}.{{kind}}": f"{ours}attention.norm.{{part}}.{{kind}}",
        f"{layer}layer_norm_1.{{kind}}": f"{ours}second_norm.{{kind}}",
        f"{layer}layer_norm_2.{{kind}}": f"{ours}mlp_norm.{{kind}}",
    }
    if info.extra.get("gate_apart"):  # older GGUF files
        names |= {
            f"{layer}mlp.gated_layers.weight": f"{ours}mlp.gate_up.up.weight",
            f"{layer}mlp.gate.weight": f"{ours}mlp.gate_up.gate.weight",
        }
    return encoder_rules(names, ("bert",), pooled_names(info) | BERT_WORDS)
