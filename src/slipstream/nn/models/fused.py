"""FusedLayers: the layers of a decoder as one call, for steps in which every row has one token.

For decoders on the CPU whose weights our C kernels read. It says no to everything else (chunks of prompts, other
devices and dtypes, norms it does not know), and the layers then run one by one, which is also its reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slipstream.nn.attention.sdpa import SdpaPlan
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import PerHeadNorm, RMSNorm
from slipstream.ops import native
from slipstream.ops.activation import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.decode_layers import (
    DecoderFacts,
    LayerWeights,
    ProductWeights,
    build_layers,
    decode_layers,
    max_rows,
)

if TYPE_CHECKING:
    from slipstream.nn.models.decoder import Block, Decoder


class FusedLayers:
    """Made on the first step that could use it: only then do all weights lie in their places."""

    def __init__(self) -> None:
        self._weights: list[LayerWeights] | None = None  # None before anyone asked; empty: cannot be
        self._most = 0
        self._caches: Any = None  # those that `_native` was built with
        self._native: Any = None

    def run(
        self, decoder: Decoder, x: torch.Tensor, rotary: torch.Tensor, local: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor | None:
        """x [B, hidden] to what the last norm gives, or None where this does not serve."""
        plan = context.plan
        if type(plan) is not SdpaPlan or not plan.is_decode or not native.serves(x):
            return None
        if len(decoder.layers) != len(context.group_of_layer):  # only some are walked through
            return None
        if self._weights is None:
            self._weights = _collect(decoder, context.group_of_layer)
            self._most = max_rows([p for layer in self._weights for p in (layer.qkv, layer.down)])
        if not self._weights or len(x) > self._most:
            return None
        if self._caches is not context.caches:
            self._native = build_layers(_facts(decoder), self._weights, decoder.norm.weight, context.caches)
            self._caches = context.caches
        batch = context.batch
        return decode_layers(self._native, x, (rotary, local), batch.slots, batch.page_tables, batch.lengths)


def _facts(decoder: Decoder) -> DecoderFacts:
    shape = decoder.shape
    return DecoderFacts(
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=decoder.rope.table.shape[-1],
        is_gelu=_first(decoder).mlp.activation is gelu_tanh_and_mul,
        norm_eps=shape.norm_eps,
        scale=_first(decoder).attention.scale,
        score_cap=shape.score_cap,
    )


def _collect(decoder: Decoder, group_of_layer: tuple[int, ...]) -> list[LayerWeights]:
    """Empty if a layer has something the kernel does not know."""
    if decoder.local_rope is not None and decoder.local_rope.table.shape[1:] != decoder.rope.table.shape[1:]:
        return []
    found = [_layer(block, group) for block, group in zip(decoder.layers, group_of_layer, strict=True)]  # type: ignore[arg-type]
    return [] if None in found else found  # type: ignore[return-value]


def _layer(block: Block, group: int) -> LayerWeights | None:
    attention, mlp = block.attention, block.mlp
    norms = (block.attention_norm, block.mlp_norm)
    products = [_product(linear) for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
    if not all(isinstance(norm, RMSNorm) for norm in norms) or None in products:
        return None
    if not isinstance(attention.norm, PerHeadNorm | None) or mlp.activation not in (silu_and_mul, gelu_tanh_and_mul):
        return None
    return LayerWeights(
        attention_norm=block.attention_norm.weight,
        attention_out_norm=None if block.attention_out_norm is None else block.attention_out_norm.weight,
        mlp_norm=block.mlp_norm.weight,
        mlp_out_norm=None if block.mlp_out_norm is None else block.mlp_out_norm.weight,
        head_norm=None if attention.norm is None else attention.norm.weight,
        qkv=products[0],  # type: ignore[arg-type]
        output=products[1],  # type: ignore[arg-type]
        gate_up=products[2],  # type: ignore[arg-type]
        down=products[3],  # type: ignore[arg-type]
        group=group,
        rope=1 if block.window else 0,
        window=block.window,
    )


def _product(linear: Linear) -> ProductWeights | None:
    runs = linear.weight.runs_for_kernels()
    if runs is None:
        return None
    return ProductWeights(runs, sum(linear.outputs.values()), linear.num_inputs, linear.bias)


def _first(decoder: Decoder) -> Any:
    return decoder.layers[0]
