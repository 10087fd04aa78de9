"""BlockAttention: attention of a block drafter, whose context positions have keys and values but no queries."""

from __future__ import annotations

import torch

from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.attention import stored_parts_of_heads
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import PerHeadNorm
from slipstream.nn.layers.sharded_linear import new_output
from slipstream.nn.shapes import AttentionShape, NormShape
from slipstream.ops.cache_write import write_cache
from slipstream.ops.rope import norm_rope, rope_and_write_cache


class BlockAttention(Layer):
    """Keys and values have a projection of their own, so that the context is not multiplied with that of queries."""

    def __init__(self, name: str, shape: AttentionShape, norm: NormShape, site: int, layout: Layout) -> None:
        """`norm` gives eps and offset of the norms of queries and keys."""
        super().__init__()
        assert shape.qk_norm == "heads", "block drafters have norms of queries and keys per head"
        self.shape = shape
        self.site = site
        size, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.query = Linear(size, {"": queries}, shape.qkv_bias, format_of(f"{name}.query"), dtype)
        self.kv = Linear(size, {"k": keys, "v": keys}, shape.qkv_bias, format_of(f"{name}.kv"), dtype)
        if shape.shard is not None:
            parts = stored_parts_of_heads(shape, shape.shard)
            self.query.stored_parts = {"": parts["q"]}
            self.kv.stored_parts = {"k": parts["k"], "v": parts["v"]}
        self.output = new_output(queries, size, shape.output_bias, format_of(f"{name}.output"), dtype, shape.shard)
        num_heads = {"q": shape.num_heads, "k": shape.num_kv_heads}
        self.norm = PerHeadNorm(num_heads, shape.head_dim, norm.eps, dtype, norm.offset)

    def write(self, features: torch.Tensor, context: ForwardContext) -> None:
        """Stores keys and values of features [T, hidden] at the slots of the context."""
        shape = self.shape
        heads = self.kv(features, context).view(len(features), 2 * shape.num_kv_heads, shape.head_dim)
        key, value = heads.split(shape.num_kv_heads, 1)
        weight = self.norm.weight[shape.num_heads :]
        key = norm_rope(key, weight, self.norm.eps, context.rotary[shape.rope])
        write_cache(key, value, *self._cache(context))

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]. All tokens write keys and values before any reads them."""
        shape = self.shape
        heads = torch.cat([self.query(x, context), self.kv(x, context)], 1).view(len(x), -1, shape.head_dim)
        query_key = heads.narrow(1, 0, shape.num_heads + shape.num_kv_heads)
        value = heads.narrow(1, shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        rotary, norm = context.rotary[shape.rope], self.norm
        query, _ = rope_and_write_cache(query_key, value, norm.weight, norm.eps, rotary, *self._cache(context))
        # a token sees keys after its own, so attention reads all of them from the pages
        out = context.attention.forward(query, None, None, self.site, shape.scale, context)
        projected: torch.Tensor = self.output(out.flatten(1), context)
        return projected

    def _cache(self, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = context.caches[self.site]
        return keys, values, context.batch.slots[context.group_of_site[self.site]]
