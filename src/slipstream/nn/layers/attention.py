"""Attention: q, k, v to output through the context's backend."""

from __future__ import annotations

import torch

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import AllHeadsNorm, NoNorm, PerHeadNorm, RMSNorm
from slipstream.nn.layers.position_embedding import RelativeKeys
from slipstream.nn.weight_format import FormatOf
from slipstream.ops.rope import norm_rope, rope_and_write_cache


class Attention(Layer):
    """Heads may share keys, queries and keys may be normed and turned by their positions.

    Causal, over the pages of a cache, or with a `reach`: each token sees the tokens of its own row in this step, all of
    them or so many to each side.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
        fused: bool,  # the checkpoint has q, k and v as one tensor
        scale: float,
        qk_norm: PerHeadNorm | AllHeadsNorm | None,
        format_of: FormatOf,
        dtype: torch.dtype,
        reach: int | None = None,  # None: causal; 0: all of the row
        relative: RelativeKeys | None = None,  # positions by distance; the layer sees all of the row
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.reach = reach
        sizes = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        parts = {"": sum(sizes.values())} if fused else sizes
        self.qkv = Linear(hidden_size, parts, qkv_bias, format_of(f"{name}.qkv"), dtype)
        self.output = Linear(sizes["q"], {"": hidden_size}, output_bias, format_of(f"{name}.output"), dtype)
        self.norm = qk_norm
        self.relative = relative

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        context: ForwardContext,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden]; rotary is the rope table's rows for the step's positions, if any; bias as in
        `AttentionBackend.bidirectional`."""
        projected: torch.Tensor = self.output(self.mix(self.qkv(x), rotary, context, bias))
        return projected

    def after_norm(
        self,
        norm: RMSNorm | NoNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: torch.Tensor,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the norm of x + residual; and that sum. Of all tokens, or only of the `last`."""
        qkv, total = norm.then(self.qkv, x, residual)
        mixed = self.mix(qkv, rotary, context, last=last)
        return self.output(mixed), total if last is None else last.of(total)

    def mix(
        self,
        qkv: torch.Tensor,
        rotary: torch.Tensor | None,
        context: ForwardContext,
        bias: torch.Tensor | None = None,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """What lies between the two products: [T, heads * head dim]. All tokens leave keys and values; those that look
        at them may be only the `last`."""
        heads = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        # queries and keys are treated alike up to here, so they go together
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        query_key = heads.narrow(1, 0, num_heads + num_kv_heads)
        value = heads.narrow(1, num_heads + num_kv_heads, num_kv_heads)
        weight, eps = None, 0.0
        if isinstance(self.norm, PerHeadNorm):
            weight, eps = self.norm.weight, self.norm.eps
        elif self.norm is not None:
            query_key = self.norm(query_key)
        if self.reach is None:
            assert rotary is not None, "what is kept in pages knows its position"
            keys, values = context.caches[self.layer]
            slots = context.batch.slots[context.group_of_layer[self.layer]]
            query, kept = rope_and_write_cache(query_key, value, weight, eps, rotary, keys, values, slots)
            if last is not None:
                query, context = last.of(query), last.context
            out = context.attention.forward(query, kept, value, self.layer, self.scale, context)
        else:
            if rotary is not None:
                query_key = norm_rope(query_key, weight, eps, rotary)
            query, key = query_key.split([num_heads, num_kv_heads], 1)
            scores = None if self.relative is None else self.relative(query, key)
            out = context.attention.bidirectional(query, key, value, self.scale, context, self.reach, bias, scores)
        return out.flatten(1)
