"""LatentAttention: multi-head latent attention (MLA) of DeepSeek-V2 and V3, in its absorbed form.

The cache holds one vector per position: a latent of `kv_rank` elements, from which keys and values of all heads can be
made, and a rotary key that all heads share. Keys are never made: the matrix that would make them is applied to the
queries instead, and that of the values to the output. So attention has one head of keys, and its values are the first
`kv_rank` elements of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear, ReorderedLinear, new_output
from slipstream.nn.layers.norm import Norm, RMSNorm
from slipstream.nn.shapes import AttentionShape, has_only
from slipstream.nn.weights.quantized_weight import dequantized_format
from slipstream.nn.weights.stored_part import even_part
from slipstream.nn.weights.weight_format import StoredPart, WeightTarget
from slipstream.ops.attention import norm_rope

_EPS = 1e-6  # of the norms of latents, whatever the model's


_KNOWN = {"num_heads", "num_kv_heads", "head_dim", "scale", "name", "qkv_bias", "output_bias", "rope", "latent"}
_KNOWN |= {"causal", "shard", "output_scale"}


class LatentAttention(Layer):
    def __init__(self, name: str, shape: AttentionShape, site: int | None, layout: Layout) -> None:
        super().__init__()
        latent = shape.latent
        assert latent is not None and site is not None
        assert has_only(shape, _KNOWN), f"latent attention does not implement all of {shape}"
        self.shape, self.latent, self.site = shape, latent, site
        dtype, format_of, hidden, num_heads = layout.dtype, layout.format_of, layout.hidden_size, shape.num_heads
        queries = num_heads * (latent.nope_dim + latent.rope_dim)
        self.num_first = latent.q_rank or queries  # outputs of the first product that are for queries
        parts = {"q": self.num_first, "kv": latent.kv_rank + latent.rope_dim}
        kv_order = _rotated_last(1, latent.kv_rank, latent.rope_dim)
        q_order = _rotated_last(num_heads, latent.nope_dim, latent.rope_dim)
        orders = {"kv": kv_order} | ({} if latent.q_rank else {"q": q_order})
        format = format_of(f"{name}.first")
        self.first = ReorderedLinear(hidden, parts, shape.qkv_bias, format, dtype, orders if latent.interleaved else {})
        self.q_norm: RMSNorm | None = None
        self.queries: Linear | None = None
        if latent.q_rank:
            self.q_norm = RMSNorm(latent.q_rank, _EPS, dtype)
            own = {"": q_order} if latent.interleaved else {}
            self.queries = ReorderedLinear(
                latent.q_rank, {"": queries}, False, format_of(f"{name}.queries"), dtype, own
            )
        self.kv_norm = RMSNorm(latent.kv_rank, _EPS, dtype)
        # per head, from the latent to the part of the key that is not rotated, and to the value
        expanded = num_heads * (latent.nope_dim + latent.value_dim)
        expand_format = dequantized_format(format_of(f"{name}.expand"), dtype)
        self.expand = expand_format.new_weight(expanded, latent.kv_rank)
        self.batch_invariant = format_of(f"{name}.expand").batch_invariant
        output_format = format_of(f"{name}.output")
        self.output = new_output(
            num_heads * latent.value_dim, hidden, shape.output_bias, output_format, dtype, shape.shard
        )
        self.stored_parts: dict[str, StoredPart] | None = None
        if shape.shard is not None:  # the latent of keys and values is whole on every rank, and so is that of queries
            heads = even_part(queries, shape.shard)
            if self.queries is None:
                self.first.stored_parts = {"q": heads}
            else:
                self.queries.stored_parts = {"": heads}
            self.stored_parts = {"expand": even_part(expanded, shape.shard)}

    def forward(self, x: torch.Tensor, context: ForwardContext, last: LastTokens | None = None) -> torch.Tensor:
        """x [T, hidden] to [T, hidden], or to [B, hidden] of the `last` tokens."""
        return self._attend(self.first(x, context), context, last)

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        made, total = self.first.after_norm(norm, x, residual, context)
        return self._attend(made, context, last), total if last is None else last.of(total)

    def store(self, x: torch.Tensor, context: ForwardContext) -> None:
        """Writes the latents of x [T, hidden], and computes no attention."""
        self._store(self.first(x, context)[:, self.num_first :], context.rotary[self.shape.rope], context)

    def products(self) -> None:
        return None

    def _attend(self, made: torch.Tensor, context: ForwardContext, last: LastTokens | None) -> torch.Tensor:
        """The outputs of the first product to those of the last."""
        latent, num_heads = self.latent, self.shape.num_heads
        queries, compressed = made.split([self.num_first, latent.kv_rank + latent.rope_dim], 1)
        rotary = context.rotary[self.shape.rope]
        key = self._store(compressed, rotary, context)
        if last is not None:
            queries, rotary, context = last.of(queries), rotary.index_select(0, last.indices), last.context
        if self.queries is not None and self.q_norm is not None:
            queries = self.queries(self.q_norm(queries.contiguous())[0], context)
        heads = queries.reshape(len(queries), num_heads, -1)
        plain, rotated = heads.split([latent.nope_dim, latent.rope_dim], 2)
        expand = self.expand.data.view(num_heads, -1, latent.kv_rank)
        to_keys, to_values = expand.split([latent.nope_dim, latent.value_dim], 1)
        absorbed = self._by_head(plain, to_keys.transpose(1, 2))
        query = torch.cat([absorbed, norm_rope(rotated, None, 0.0, rotary)], 2)
        value = None if key is None else key[..., : latent.kv_rank]
        mixed = context.attention.forward(query, key, value, self.site, self.shape.scale, context)
        out = self._by_head(mixed, to_values)
        projected: torch.Tensor = self.output(out.reshape(len(out), -1), context)
        return projected

    def _by_head(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, heads, in] by the transposes of [heads, out, in], to [T, heads, out]."""
        if self.batch_invariant:
            from slipstream.ops.gemm.linear.triton import batch_invariant_heads

            return batch_invariant_heads(x, weights)
        return torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)

    def _store(self, compressed: torch.Tensor, rotary: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The key of each token, [T, 1, kv rank + rope dim], which is also written to its slot."""
        latent, rotated = compressed.split([self.latent.kv_rank, self.latent.rope_dim], 1)
        normed, _ = self.kv_norm(latent.contiguous())
        key = torch.cat([normed, norm_rope(rotated.unsqueeze(1), None, 0.0, rotary).squeeze(1)], 1).unsqueeze(1)
        keys, _ = context.caches[self.site]  # values are a part of them
        keys.flatten(0, 1).index_copy_(0, context.batch.slots[context.group_of_site[self.site]], key)
        return key

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for kind, target in self.expand.targets(0, self.expand.data.shape[0]):
            yield f"expand.{kind}", target


def _rotated_last(num_heads: int, plain: int, rotated: int) -> list[int]:
    """Rows of a projection whose heads end in elements that are rotated in adjacent pairs, in the order in which our
    rope rotates them: the first of all pairs, then the second of all pairs."""
    size = plain + rotated
    of_head = [*range(plain), *range(plain, size, 2), *range(plain + 1, size, 2)]
    return [head * size + row for head in range(num_heads) for row in of_head]
