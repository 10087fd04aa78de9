"""FusedCpu: the layers of a decoder as one C call, for steps in which every row has one token.

It runs float32 decoders on the CPU whose layers are attention and a gated feed-forward of one size, with weights that
the C kernels read. All other steps run by the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.nn.attention.sdpa import SdpaMetadata
from slipstream.nn.blocks.block import DecoderBlock, SublayerParts
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import RMSNorm
from slipstream.nn.shapes import AttentionShape, MlpShape
from slipstream.ops import native
from slipstream.ops.activation import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.decode_layers import (
    DecoderSpec,
    LayerWeights,
    ProductWeights,
    build_layers,
    decode_layers,
    max_rows,
)

Pair = tuple[SublayerParts, SublayerParts]
"""Attention and feed-forward of a block."""


class FusedCpu:
    def __init__(self, pairs: Sequence[Pair], norm: RMSNorm) -> None:
        self.pairs = pairs
        self.norm = norm
        # collected at the first step: low-bit weights are packed when they are filled. Empty: a weight has no C form
        self._weights: list[LayerWeights] | None = None
        self._max_rows = 0
        self._caches: Any = None  # those that `_native` points at
        self._native: Any = None

    @classmethod
    def of(cls, blocks: Sequence[DecoderBlock], norm: RMSNorm) -> FusedCpu | None:
        """None if a block has a part that the C code does not know, or another size than the first block."""
        pairs = [_pair(block) for block in blocks]
        found = [pair for pair in pairs if pair is not None]
        if not found or len(found) != len(pairs) or len({_sizes(pair) for pair in found}) > 1:
            return None
        return cls(found, norm)

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor | None:
        """x [B, hidden] to the normed hidden states; None: the step has chunks, adapters or too many rows, or there are
        no kernels yet."""
        metadata, lora = context.metadata, context.batch.lora
        if lora is not None or type(metadata) is not SdpaMetadata or not metadata.is_decode or not native.serves(x):
            return None
        if self._weights is None:
            self._weights = _collect(self.pairs, context)
            self._max_rows = max_rows([p for layer in self._weights for p in (layer.qkv, layer.down)])
        if not self._weights or len(x) > self._max_rows:
            return None
        if self._caches is not context.caches:
            caches = [context.caches[_site(pair)] for pair in self.pairs]
            self._native = build_layers(_decoder_spec(self.pairs[0], context), self._weights, self.norm.weight, caches)
            self._caches = context.caches
        batch = context.batch
        return decode_layers(self._native, x, context.rotary, batch.slots, batch.page_tables, batch.lengths)


def _pair(block: DecoderBlock) -> Pair | None:
    parts = block.chain_parts()
    if parts is None or len(parts) != 2:
        return None
    attention, feed = parts
    if not isinstance(attention.products.shape, AttentionShape) or not isinstance(feed.products.shape, MlpShape):
        return None
    shape = attention.products.shape
    knows_attention = shape.has_own_site and shape.qk_norm != "whole" and not shape.sinks
    knows_attention = knows_attention and not shape.value_norm and not shape.key_is_value and not shape.gated
    knows_attention = knows_attention and not shape.norm_after_rope and shape.query_scale is None
    knows_activation = feed.products.activation in (silu_and_mul, gelu_tanh_and_mul)
    return (attention, feed) if knows_attention and knows_activation else None


def _site(pair: Pair) -> int:
    site = pair[0].products.site
    assert site is not None, "attention without a cache"
    return site


def _sizes(pair: Pair) -> tuple[Any, ...]:
    """Sizes that the C code has once for all layers."""
    attention, feed = pair[0].products.shape, pair[1].products.shape
    assert isinstance(attention, AttentionShape) and isinstance(feed, MlpShape)
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale, attention.soft_cap)
    return *heads, feed.size, feed.activation, pair[0].norm.eps, pair[1].norm.eps


def _decoder_spec(pair: Pair, context: ForwardContext) -> DecoderSpec:
    attention, feed = pair[0].products.shape, pair[1].products.shape
    assert isinstance(attention, AttentionShape) and isinstance(feed, MlpShape)
    return DecoderSpec(
        hidden_size=pair[0].products.first.num_inputs,
        ffn_size=feed.size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=context.rotary[0].shape[-1],
        is_gelu=pair[1].products.activation is gelu_tanh_and_mul,
        norm_eps=pair[0].norm.eps,
        scale=attention.scale,
        score_cap=attention.soft_cap,
    )


def _collect(pairs: Sequence[Pair], context: ForwardContext) -> list[LayerWeights]:
    """Empty if a weight has no form that the C code reads, or if ropes have several sizes."""
    if len({rows.shape[1:] for rows in context.rotary}) > 1:
        return []
    found = [_layer(pair, context.group_of_site[_site(pair)]) for pair in pairs]
    layers = [layer for layer in found if layer is not None]
    return layers if len(layers) == len(found) else []


def _layer(pair: Pair, group: int) -> LayerWeights | None:
    attention, feed = pair
    shape = attention.products.shape
    assert isinstance(shape, AttentionShape)
    qkv, output = _product(attention.products.first), _product(attention.products.last)
    gate_up, down = _product(feed.products.first), _product(feed.products.last)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    head_norm = attention.products.head_norm
    return LayerWeights(
        attention_norm=attention.norm.weight,
        attention_out_norm=None if attention.norm_after is None else attention.norm_after.weight,
        mlp_norm=feed.norm.weight,
        mlp_out_norm=None if feed.norm_after is None else feed.norm_after.weight,
        head_norm=None if head_norm is None else head_norm.weight,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        group=group,
        rope=shape.rope,
        window=shape.window,
    )


def _product(linear: Linear) -> ProductWeights | None:
    runs = linear.weight.runs_for_kernels()
    return None if runs is None else ProductWeights(runs, linear.num_outputs, linear.num_inputs, linear.bias)
