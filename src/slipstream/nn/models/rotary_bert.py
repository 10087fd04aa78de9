"""BERT with rotary positions and gated feed-forwards: NomicBERT, and the one that Alibaba's GTE checkpoints of 1.5 call
NewModel, Snowflake's GteModel."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo
from slipstream.nn.models.bert import bert_shape, encoder_rules, pooled_names
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.weights.rules import Rules


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
