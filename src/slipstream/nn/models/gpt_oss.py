"""gpt-oss: experts with biases and a clamped gate, attention with sinks, a window in every second layer, YaRN."""

from __future__ import annotations

from dataclasses import replace

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.llama import llama_attention, llama_rules, llama_shape
from slipstream.nn.models.moe import expert_shape, needed_number, with_feeds
from slipstream.nn.models.windows import layer_windows
from slipstream.nn.weights.rules import Rules
from slipstream.ops.moe.reference import CLAMP_LIMIT, RouterRule


def gpt_oss_shape(info: ModelInfo) -> DecoderShape:
    """The layers with a window are the first, the third and so on."""
    limit = float(info.extra.get("swiglu_limit") or CLAMP_LIMIT)
    if limit != CLAMP_LIMIT:
        raise UnsupportedModel(f"gpt-oss with a swiglu_limit of {limit} is not supported; only {CLAMP_LIMIT} is")
    # a softmax over the chosen logits is the softmax over all of them, renormalized
    feed = expert_shape(info, info.ffn_size, RouterRule(needed_number(info, "num_experts_per_tok")))
    feed = replace(feed, gate="clamped_swiglu", bias=True, router_bias=True)
    windows = layer_windows(info, lambda layer: layer % 2 == 0)
    shape = llama_shape(info, replace(llama_attention(info), sinks=True), windows=windows)
    return replace(with_feeds(shape, lambda layer: feed), transposed_experts=True)


def gpt_oss_rules(shape: DecoderShape) -> Rules:
    layer = "model.layers.{n}"
    return llama_rules(
        shape,
        {
            f"{layer}.self_attn.sinks": "layers.{n}.attention.sinks",
            f"{layer}.mlp.router.{{kind}}": "layers.{n}.mlp.router.{kind}",
            f"{layer}.mlp.experts.{{e}}.{{part}}_proj.{{kind}}": "layers.{n}.mlp.experts.{e}.{part}.{kind}",
        },
    )
