"""Attention: the projections to q, k and v, attention through the context's backend, and the output projection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from slipstream.nn.context import ForwardContext, LastTokens, context_of
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import (
    InterleavedLinear,
    Linear,
    Products,
    ReorderedLinear,
    StoredRows,
    new_output,
    pairs_as_halves,
    rows_of_heads,
)
from slipstream.nn.layers.norm import (
    AllHeadsNorm,
    EachHeadLayerNorm,
    Norm,
    PerHeadNorm,
    ShardedHeadsNorm,
    UnweightedNorm,
)
from slipstream.nn.layers.position_embedding import DisentangledScores, RelativeKeys
from slipstream.nn.shapes import AttentionShape, NormShape, Shard, has_only
from slipstream.nn.weights.stored_part import even_part, joined_part
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    StoredPart,
    WeightFormat,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.attention import norm_rope, rope_and_write_cache, write_cache
from slipstream.ops.elementwise import sigmoid_gate_

# fields that the kernel of a single token implements, or the products and the gate around it
_KNOWN_OF_SINGLE = {"name", "num_heads", "num_kv_heads", "head_dim", "scale", "rope", "qk_norm", "value_norm", "gated"}
_KNOWN_OF_SINGLE |= {"qkv_bias", "output_bias", "fused", "by_head", "rotary_pairs", "key_is_value"}
_KNOWN_OF_SINGLE |= {"shard", "num_kv_heads_of_all", "output_scale"}
# fields that the first product, `mix` and the last product implement
_KNOWN_OF_PRODUCTS = _KNOWN_OF_SINGLE - {"shard", "num_kv_heads_of_all", "output_scale"}
_KNOWN_OF_PRODUCTS |= {"norm_after_rope", "query_scale", "window", "soft_cap", "sinks", "kv_source"}


class Attention(Layer):
    """Causal attention writes keys and values to the pages of its cache site and reads them there, or only reads the
    site of an earlier layer (`kv_source`). Bidirectional attention has no cache: each token sees the tokens of its own
    row in this step, all of them or `window` to each side."""

    def __init__(
        self,
        name: str,
        shape: AttentionShape,
        norm: NormShape,
        site: int | None,
        layout: Layout,
        relative: RelativeKeys | DisentangledScores | None = None,
        num_inputs: int | None = None,
    ) -> None:
        """`norm` gives eps and offset of the norms of queries and keys. `relative` adds scores by distance; the layer
        must see the whole row. `num_inputs`: if the input is not a hidden state."""
        super().__init__()
        self.shape = shape
        self.site = site  # of the cache; None: bidirectional
        queries = shape.num_heads * shape.head_dim
        format_of, dtype, hidden_size = layout.format_of, layout.dtype, layout.hidden_size
        self.qkv = _new_qkv(shape, num_inputs or hidden_size, format_of(f"{name}.qkv"), dtype)
        self.stored_parts: dict[str, StoredPart] | None = None
        if shape.shard is not None:
            self.qkv.stored_parts = stored_parts_of_heads(shape, shape.shard)
            self.stored_parts = {"sinks": even_part(shape.num_heads, shape.shard)}
        output_format = format_of(f"{name}.output")
        self.output = new_output(queries, hidden_size, shape.output_bias, output_format, dtype, shape.shard)
        self.norm = _qk_norm(shape, norm, dtype)
        self.may_be_single = has_only(shape, _KNOWN_OF_SINGLE) and (self.norm is None or type(self.norm) is PerHeadNorm)
        has_value_norm = shape.value_norm and shape.kv_source is None
        self.value_norm = UnweightedNorm(shape.head_dim, norm.eps, dtype) if has_value_norm else None
        self.relative = relative
        self.sinks = new_parameter(shape.num_heads, dtype=dtype) if shape.sinks else None

    def forward(
        self,
        x: torch.Tensor,
        context: ForwardContext,
        last: LastTokens | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] to [T, hidden], or to [B, hidden] of the `last` tokens; bias as in
        `AttentionBackend.bidirectional`."""
        mixed = self.mix(self.qkv(x, context), context, last, bias)
        projected: torch.Tensor = self.output(mixed, context_of(context, last))
        return projected

    def after_norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SublayerModule.after_norm`."""
        qkv, total = self.qkv.after_norm(norm, x, residual, context)
        mixed = self.mix(qkv, context, last)
        return self.output(mixed, context_of(context, last)), total if last is None else last.of(total)

    def store(self, x: torch.Tensor, context: ForwardContext) -> None:
        """Writes keys and values of x [T, hidden], and computes no attention."""
        qkv = self.qkv(x, context)
        if self.shape.gated:
            qkv = qkv[:, : qkv.shape[1] - self.shape.num_heads * self.shape.head_dim]
        self._write(*self._split(qkv), context)

    def products(self) -> Products | None:
        if not has_only(self.shape, _KNOWN_OF_PRODUCTS):
            return None
        head_norm = self.norm if type(self.norm) is PerHeadNorm else None
        return Products(self.shape, self.qkv, self.output, mix=self.mix, head_norm=head_norm, site=self.site)

    def mix(
        self,
        qkv: torch.Tensor,
        context: ForwardContext,
        last: LastTokens | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The part between the two projections, to [T, heads * head dim]. All tokens write keys and values; with `last`
        only the last tokens have queries."""
        if not self.shape.gated:
            return self._attend(qkv, context, last, bias)
        num_gates = self.shape.num_heads * self.shape.head_dim
        qkv, gate = qkv.split([qkv.shape[1] - num_gates, num_gates], 1)
        return sigmoid_gate_(self._attend(qkv, context, last, bias), gate if last is None else last.of(gate))

    def _attend(
        self, qkv: torch.Tensor, context: ForwardContext, last: LastTokens | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        shape = self.shape
        if shape.kv_source is not None:
            return self._mix_shared(qkv, context, last)
        query_key, value = self._split(qkv)
        if self.site is not None:
            single = self._attend_single(query_key, value, context) if last is None else None
            if single is not None:
                return single.flatten(1)
            query, kept = self._write(query_key, value, context)
            query = query if context.query_scale is None else query * context.query_scale
            if last is not None:
                query, context = last.of(query), last.context
            out = context.attention.forward(query, kept, value, self.site, shape.scale, context, self.sinks)
        else:
            query_key = self._norm_and_rotate(query_key, context.rotary[shape.rope] if context.rotary else None)
            query, key = query_key.split([shape.num_heads, shape.num_kv_heads], 1)
            query = query if context.query_scale is None else query * context.query_scale
            scores = None if self.relative is None else self.relative(query, key, partial(self._of_distances, context))
            out = context.attention.bidirectional(query, key, value, shape.scale, context, shape.window, bias, scores)
        return out.flatten(1)

    def _attend_single(
        self, query_key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor | None:
        """Norm, RoPE, cache write and attention of one token by one kernel; None if there is none."""
        assert self.site is not None
        if len(value) != 1 or not self.may_be_single or context.query_scale is not None:
            return None
        query_key, weight, eps = self._head_norm(query_key)
        rotary = context.rotary[self.shape.rope]
        return context.attention.forward_single(
            query_key, value, weight, eps, rotary, self.site, self.shape.scale, context
        )

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys side by side, and values, each [T, heads, head dim]. Norm and rope treat queries and keys
        alike, so one call takes both."""
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        heads = qkv.view(len(qkv), -1, self.shape.head_dim)
        value = heads.narrow(1, heads.shape[1] - num_kv_heads, num_kv_heads)
        if self.value_norm is not None:
            value = self.value_norm(value)
        return heads.narrow(1, 0, num_heads + num_kv_heads), value

    def _of_distances(self, context: ForwardContext) -> torch.Tensor:
        """q, k and v of the embedding of each distance."""
        assert context.relative_positions is not None
        embeddings, rows = context.relative_positions
        projected: torch.Tensor = self.qkv(embeddings)  # rows are distances, not tokens of the step
        return projected.index_select(0, rows)

    def _write(
        self, query_key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normed and rotated queries, and keys unless attention reads them from the pages only; writes keys and values
        to their slots."""
        assert self.site is not None
        keys, values = context.caches[self.site]
        slots = context.batch.slots[context.group_of_site[self.site]]
        rotary = context.rotary[self.shape.rope]
        if not self.shape.norm_after_rope:
            query_key, weight, eps = self._head_norm(query_key)
            return rope_and_write_cache(query_key, value, weight, eps, rotary, keys, values, slots)
        made = self._norm_and_rotate(query_key, rotary)
        query, key = made.split([self.shape.num_heads, self.shape.num_kv_heads], 1)
        write_cache(key, value, keys, values, slots)
        return query, key

    def _norm_and_rotate(self, query_key: torch.Tensor, rotary: torch.Tensor | None) -> torch.Tensor:
        if self.shape.norm_after_rope:
            assert self.norm is not None and rotary is not None
            normed: torch.Tensor = self.norm(norm_rope(query_key, None, 0.0, rotary))
            return normed
        query_key, weight, eps = self._head_norm(query_key)
        return query_key if rotary is None else norm_rope(query_key, weight, eps, rotary)

    def _mix_shared(self, projected: torch.Tensor, context: ForwardContext, last: LastTokens | None) -> torch.Tensor:
        """Queries only: an earlier layer has written this step's keys and values."""
        shape = self.shape
        assert self.site is not None
        query, weight, eps = self._head_norm(projected.view(-1, shape.num_heads, shape.head_dim))
        query = norm_rope(query, weight, eps, context.rotary[shape.rope])
        if last is not None:
            query, context = last.of(query), last.context
        return context.attention.forward(query, None, None, self.site, shape.scale, context, self.sinks).flatten(1)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The sinks; the targets of projections and norms are yielded by these modules."""
        if self.sinks is not None:
            yield "sinks", WeightTarget((self.shape.num_heads,), self._fill_sinks)

    def _fill_sinks(self, piece: CheckpointTensor) -> None:
        assert self.sinks is not None
        piece.write_to(self.sinks)

    def _head_norm(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """The heads, and weight and eps of a norm per head, which is left to the kernel that applies the rope."""
        if type(self.norm) is PerHeadNorm:
            return heads, self.norm.weight, self.norm.eps
        return heads if self.norm is None else self.norm(heads), None, 0.0


def _new_qkv(shape: AttentionShape, hidden_size: int, format: WeightFormat, dtype: torch.dtype) -> Linear:
    """Gates come last, so that queries, keys and values lie as in attention without gates."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    parts = {"q": queries}
    if shape.kv_source is None:
        parts |= {"k": keys} if shape.key_is_value else {"k": keys, "v": keys}
    if shape.gated:
        assert not shape.fused, "a checkpoint with gates stores q, k and v apart"
        stored = {part: StoredRows(1, (part,)) for part in parts} | {"q": StoredRows(shape.num_heads, ("q", "gate"))}
        return InterleavedLinear(hidden_size, parts | {"gate": queries}, stored, shape.qkv_bias, format, dtype)
    if shape.by_head:
        stored = {"": StoredRows(shape.num_heads, ("q", "k", "v"))}
        return InterleavedLinear(hidden_size, parts, stored, shape.qkv_bias, format, dtype)
    if shape.fused:
        parts = {"": sum(parts.values())}
    if shape.rotary_pairs:
        order = pairs_as_halves(shape.head_dim, shape.rotary_pairs)
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads}
        orders = {part: rows_of_heads(count, order) for part, count in heads.items()}
        return ReorderedLinear(hidden_size, parts, shape.qkv_bias, format, dtype, orders)
    return Linear(hidden_size, parts, shape.qkv_bias, format, dtype)


def _stored_heads(shape: AttentionShape, shard: Shard) -> dict[str, StoredPart]:
    """The heads of a rank among those of all ranks. Ranks with neighbouring query heads have the same key head where
    there are fewer key heads than ranks."""
    first = shard.rank * shape.num_kv_heads_of_all // shard.size
    keys = StoredPart(((first, shape.num_kv_heads),), shape.num_kv_heads_of_all)
    return {"q": even_part(shape.num_heads, shard), "k": keys}


def stored_parts_of_heads(shape: AttentionShape, shard: Shard) -> dict[str, StoredPart]:
    """Rows of the heads of a rank in the checkpoint's tensors."""
    queries = shape.num_heads * shape.head_dim
    keys = _stored_heads(shape, shard)["k"].times(shape.head_dim)
    if shape.by_head:
        return {"": even_part(3 * queries, shard)}
    if shape.fused:
        values = [] if shape.key_is_value else [keys]
        return {"": joined_part([even_part(queries, shard), keys, *values])}
    return {"q": even_part(2 * queries if shape.gated else queries, shard), "k": keys, "v": keys}


def _qk_norm(
    shape: AttentionShape, norm: NormShape, dtype: torch.dtype
) -> PerHeadNorm | AllHeadsNorm | ShardedHeadsNorm | EachHeadLayerNorm | None:
    if shape.qk_norm == "none":
        return None
    num_heads = {"q": shape.num_heads} | ({} if shape.kv_source is not None else {"k": shape.num_kv_heads})
    heads = {} if shape.shard is None else _stored_heads(shape, shape.shard)
    if shape.qk_norm in ("each", "each apart"):
        order = pairs_as_halves(shape.head_dim, shape.rotary_pairs)
        return EachHeadLayerNorm(num_heads, norm.eps, order, shape.qk_norm == "each apart", dtype, heads)
    if shape.qk_norm == "whole" and shape.shard is not None:
        assert norm.kind == "rms" and norm.offset == 0.0, "decoders with norms over all heads have RMS norms"
        parts = {kind: heads[kind].times(shape.head_dim) for kind in num_heads}
        return ShardedHeadsNorm(num_heads, parts, norm.eps, dtype, shape.shard)
    if shape.qk_norm == "whole":
        return AllHeadsNorm(num_heads, shape.head_dim, norm, dtype)
    assert norm.kind == "rms", "a layer norm per head has weights for each head"
    return PerHeadNorm(num_heads, shape.head_dim, norm.eps, dtype, norm.offset)
