"""Attention: q, k, v to output through the context's backend."""

from __future__ import annotations

import torch

from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import HeadNorm, WholeNorm
from slipstream.nn.quant import FormatOf
from slipstream.ops.rope import norm_rope


class Attention(Layer):
    """Causal attention with rotary positions; heads may share keys, queries and keys may be normed."""

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
        qk_norm: HeadNorm | WholeNorm | None,
        format_of: FormatOf,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        sizes = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        parts = {"": sum(sizes.values())} if fused else sizes
        self.qkv = Linear(hidden_size, parts, qkv_bias, format_of(f"{name}.qkv"), dtype)
        self.output = Linear(sizes["q"], {"": hidden_size}, output_bias, format_of(f"{name}.output"), dtype)
        self.norm = qk_norm

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [T, hidden]; rotary is the rope table's rows for the step's positions."""
        heads = self.qkv(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        # queries and keys are treated alike up to here, so they go together
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        query_key = heads.narrow(1, 0, num_heads + num_kv_heads)
        value = heads.narrow(1, num_heads + num_kv_heads, num_kv_heads)
        weight, eps = None, 0.0
        if isinstance(self.norm, HeadNorm):
            weight, eps = self.norm.weight, self.norm.eps
        elif self.norm is not None:
            query_key = self.norm(query_key)
        query_key = norm_rope(query_key, weight, eps, rotary)
        query, key = query_key.narrow(1, 0, num_heads), query_key.narrow(1, num_heads, num_kv_heads)
        out = context.attention.forward(query, key, value, self.layer, self.scale, context)
        projected: torch.Tensor = self.output(out.flatten(1))
        return projected
