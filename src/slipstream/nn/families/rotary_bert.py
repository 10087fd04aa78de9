"""BERT with rotary positions and gated feed-forwards: NomicBERT, and the one that Alibaba's GTE checkpoints of 1.5 call
NewModel, Snowflake's GteModel."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.encoder import EncoderShape
from slipstream.nn.families.bert import BERT_NAMES, BERT_WORDS, bert_shape, encoder_rules, pooled_names
from slipstream.nn.families.llama import layer_windows, llama_rules
from slipstream.nn.pooling_heads import HeadShape
from slipstream.nn.weights.source import Rules


def nomic_shape(info: ModelInfo) -> EncoderShape:
    extra = info.extra
    if extra.get("num_experts") or extra.get("moe_every_n_layers"):
        raise UnsupportedModel("NomicBERT with experts is not supported; use a dense one")
    if extra.get("prenorm") or extra.get("rotary_emb_interleaved") or extra.get("use_rms_norm"):
        raise UnsupportedModel("NomicBERT with prenorm, interleaved rope or RMS norms is not supported; use another")
    fraction = extra.get("rotary_emb_fraction", 1.0)
    if fraction != 1.0:
        raise UnsupportedModel(f"NomicBERT with rotary_emb_fraction {fraction} is not supported; 1 is")
    theta = extra.get("rotary_emb_base")  # where the first releases have it
    return replace(
        bert_shape(info),
        activation={"swiglu": "silu", "geglu": "gelu"}.get(info.activation, info.activation),
        position_offset=None,
        rope=info.rope if theta is None else RopeInfo(theta=float(theta)),
        fused=True,
        gate="parts",
        qkv_bias=bool(extra.get("qkv_proj_bias", False)),
        output_bias=bool(extra.get("qkv_proj_bias", False)),
        mlp_bias=bool(extra.get("mlp_fc1_bias", False)),
        down_bias=bool(extra.get("mlp_fc2_bias", False)),
    )


def gte_shape(info: ModelInfo) -> EncoderShape:
    extra = info.extra
    for fact, built in (("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm")):
        if extra.get(fact, built) != built:
            raise UnsupportedModel(f"{info.architecture} with {fact} {extra[fact]} is not supported; {built} is")
    if extra.get("logn_attention_scale"):
        raise UnsupportedModel(
            f"{info.architecture} with logn_attention_scale is not supported; a checkpoint without it is"
        )
    plain = msgspec.structs.replace(info, extra=extra | {"position_embedding_type": "absolute"})
    return replace(
        bert_shape(plain),
        position_offset=None,
        rope=info.rope,
        fused=bool(extra.get("pack_qkv", True)),
        gate="up first",
        mlp_bias=False,
    )


_NOMIC: dict[str, str | None] = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.token_type_embeddings.weight": "types.weight",
    "emb_ln.{kind}": "embedding_norm.{kind}",
    "encoder.layers.{n}.attn.Wqkv.{kind}": "layers.{n}.attention.qkv.{kind}",
    "encoder.layers.{n}.attn.out_proj.{kind}": "layers.{n}.attention.output.{kind}",
    "encoder.layers.{n}.attn.rotary_emb.inv_freq": None,
    "encoder.layers.{n}.norm1.{kind}": "layers.{n}.attention_norm.{kind}",
    "encoder.layers.{n}.mlp.fc11.{kind}": "layers.{n}.mlp.gate_up.up.{kind}",
    "encoder.layers.{n}.mlp.fc12.{kind}": "layers.{n}.mlp.gate_up.gate.{kind}",
    "encoder.layers.{n}.mlp.fc2.{kind}": "layers.{n}.mlp.down.{kind}",
    "encoder.layers.{n}.norm2.{kind}": "layers.{n}.mlp_norm.{kind}",
}
_GTE: dict[str, str | None] = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.token_type_embeddings.weight": "types.weight",
    "embeddings.LayerNorm.{kind}": "embedding_norm.{kind}",
    "embeddings.position_ids": None,
    "embeddings.rotary_emb.inv_freq": None,
    "encoder.layer.{n}.attention.o_proj.{kind}": "layers.{n}.attention.output.{kind}",
    "encoder.layer.{n}.attention.qkv_proj.{kind}": "layers.{n}.attention.qkv.{kind}",
    "encoder.layer.{n}.attention.{part}_proj.{kind}": "layers.{n}.attention.qkv.{part}.{kind}",
    "encoder.layer.{n}.attn_ln.{kind}": "layers.{n}.attention_norm.{kind}",
    "encoder.layer.{n}.mlp.up_gate_proj.{kind}": "layers.{n}.mlp.gate_up.{kind}",
    "encoder.layer.{n}.mlp.down_proj.{kind}": "layers.{n}.mlp.down.{kind}",
    "encoder.layer.{n}.mlp_ln.{kind}": "layers.{n}.mlp_norm.{kind}",
}


def nomic_rules(info: ModelInfo) -> Rules:
    words = {
        "cls.predictions.transform.dense.{kind}": "heads.transform.dense.{kind}",
        "cls.predictions.transform.layer_norm.{kind}": "heads.transform.norm.{kind}",
        "cls.predictions.bias": "heads.vocabulary_bias.bias",
        "cls.*": None,
    }
    return encoder_rules(_NOMIC, ("nomic_bert", "bert"), pooled_names(info) | words)


def gte_rules(info: ModelInfo) -> Rules:
    words = {
        "lm_head.dense.{kind}": "heads.transform.dense.{kind}",
        "lm_head.norm.{kind}": "heads.transform.norm.{kind}",
        "lm_head.decoder.bias": "heads.vocabulary_bias.bias",
        "lm_head.decoder.weight": None,
    }
    return encoder_rules(_GTE, ("new", "gte"), pooled_names(info) | words)


# JinaBERT v2 (jina-embeddings-v2): BERT without positions, scores that decrease with the distance, gated MLPs.
#
# The model of code (jina-bert-v2-qk-post-norm) also norms queries and keys, and the sum of attention and its input
# twice.

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


# ModernBERT: rotary positions, norms before, gated feed-forwards without biases; most layers see a window.


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


# EuroBERT: Llama's layers, in which every token sees the whole text, with heads of an encoder.


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
