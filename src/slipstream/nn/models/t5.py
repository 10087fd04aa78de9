"""The encoder of T5 (sentence-t5, gtr): RMS norms before, a bias by distance, no biases, unscaled scores."""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.bert import bert_shape, encoder_rules
from slipstream.nn.models.encoder import EncoderShape
from slipstream.nn.models.pooling_heads import HeadShape
from slipstream.nn.weights.rules import Rules


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
