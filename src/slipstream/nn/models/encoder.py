"""Encoder: an embedding and a list of blocks in which every token sees its whole text. Nothing is cached.

Families differ in the facts of an `EncoderShape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from slipstream.cache_spec import CacheSpec
from slipstream.config.rope_info import RopeInfo
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.embedding import Embedding
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.layer_norm import LayerNorm
from slipstream.nn.layers.mlp import Mlp, PlainMlp
from slipstream.nn.layers.position_embedding import DistanceBias, RelativeKeys, Table
from slipstream.nn.layers.rope import Rope
from slipstream.nn.models.pooling_heads import Heads
from slipstream.nn.weight_format import FormatOf, take_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """All that tells one encoder from another."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ffn_size: int
    activation: str
    norm_eps: float
    max_positions: int  # of a text
    position_offset: int | None = None  # rows of the table of positions before position 0's; None: it has no table
    num_types: int = 0  # of tokens
    num_buckets: int = 0  # of distances that have a bias in attention; 0: they have none
    relative: Literal["", "queries", "queries and keys"] = ""  # which are compared with a vector for each distance
    rope: RopeInfo | None = None
    local_rope: RopeInfo | None = None  # of layers with a reach
    reaches: tuple[int, ...] = ()  # by layer, how many tokens each sees to either side; 0: all
    norm_before: bool = False  # of what goes into attention and feed-forward, not of their sums with what went in
    norm_bias: bool = True
    fused: bool = False  # the checkpoint has q, k and v as one tensor
    gate: Literal["none", "parts", "fused", "up first"] = "none"  # of the feed-forward, and how the checkpoint has it
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    down_bias: bool = True
    score_cap: float = 0.0  # no encoder bounds its scores; the runner asks every model

    def cache_specs(self, page_size: int, itemsize: int) -> list[CacheSpec]:
        """Texts are computed whole, and nothing of them is kept."""
        return []


class Encoder(nn.Module):
    """Laid out on the meta device, then given memory by `materialize` and filled by `nn/weights/load.py`."""

    def __init__(self, shape: EncoderShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        """`num_positions` is the longest text that will be run."""
        super().__init__()
        self.shape = shape
        self.heads: Heads | None = None  # what a checkpoint has for pooling; `load.py` gives it
        with torch.device("meta"):
            self.embedding = Embedding(shape.vocab_size, shape.hidden_size, format_of("embedding"))
            self.positions: Table | None = None
            if shape.position_offset is not None and not shape.relative:
                self.positions = Table(shape.max_positions, shape.hidden_size, dtype, shape.position_offset)
            self.types: Table | None = None
            if shape.num_types:
                self.types = Table(shape.num_types, shape.hidden_size, dtype)
            self.embedding_norm = LayerNorm(shape.hidden_size, shape.norm_eps, dtype, shape.norm_bias)
            self.distances: DistanceBias | None = None
            if shape.num_buckets:
                self.distances = DistanceBias(shape.num_buckets, shape.num_heads, num_positions, dtype)
            self.rope = self._rope(shape.rope, num_positions, dtype)
            self.local_rope = self._rope(shape.local_rope, num_positions, dtype, switches=False)
            block = BlockNormedBefore if shape.norm_before else Block
            self.layers = nn.ModuleList(
                block(layer, shape, dtype, format_of, num_positions) for layer in range(shape.num_layers)
            )
            self.norm: LayerNorm | None = None
            if shape.norm_before:
                self.norm = LayerNorm(shape.hidden_size, shape.norm_eps, dtype, shape.norm_bias)
        self.eval()

    def _rope(
        self, info: RopeInfo | None, num_positions: int, dtype: torch.dtype, *, switches: bool = True
    ) -> Rope | None:
        sizes = (self.shape.head_dim, self.shape.max_positions, num_positions)
        return None if info is None else Rope(info, *sizes, dtype, switches=switches)

    def materialize(self, device: torch.device) -> None:
        """Take memory on the device. Parameters hold nothing yet."""
        take_memory(self, device)
        for module in self.modules():
            if isinstance(module, Rope | DistanceBias):
                module.fill()
        if self.heads is not None:
            self.heads.fill_buffers()

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        x = self.embedding_norm(self._embed(batch))
        rope_rows = batch.positions if batch.rope_rows is None else batch.rope_rows
        rotary = None if self.rope is None else self.rope(rope_rows)
        local = rotary if self.local_rope is None else self.local_rope(batch.positions)
        bias = None if self.distances is None else self.distances()
        residual = None
        for block in self.layers:
            x, residual = block(x, residual, local if block.attention.reach else rotary, bias, context)
        if self.norm is not None:
            x = self.norm(x, residual)
        return x

    def _embed(self, batch: BatchView) -> torch.Tensor:
        x: torch.Tensor = self.embedding(batch.ids)
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        if self.types is not None:
            # without types all tokens have the first
            x = x + (self.types.weight[0] if batch.token_types is None else self.types(batch.token_types))
        return x

    def lm_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the projection to tokens, which is the embedding."""
        return self.embedding(ids)

    def cache_specs(self, page_size: int, itemsize: int) -> list[CacheSpec]:
        return self.shape.cache_specs(page_size, itemsize)


class Block(Layer):
    """Attention and a feed-forward; the sum of each with what went in is normed, as in BERT."""

    def __init__(
        self, layer: int, shape: EncoderShape, dtype: torch.dtype, format_of: FormatOf, num_positions: int
    ) -> None:
        super().__init__()
        name = f"layers.{layer}"
        relative = None
        if shape.relative:
            # the checkpoint counts the rows before position 0 too
            positions = shape.max_positions + (shape.position_offset or 0)
            by_keys = shape.relative == "queries and keys"
            relative = RelativeKeys(positions, num_positions, shape.head_dim, by_keys, dtype)
        self.attention = Attention(
            f"{name}.attention",
            layer,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            fused=shape.fused,
            scale=shape.head_dim**-0.5,
            qk_norm=None,
            format_of=format_of,
            dtype=dtype,
            reach=shape.reaches[layer] if shape.reaches else 0,
            relative=relative,
        )
        self.attention_norm = self._norm(layer, shape, dtype)
        sizes = (f"{name}.mlp", shape.hidden_size, shape.ffn_size, shape.activation)
        if shape.gate == "none":
            self.mlp: nn.Module = PlainMlp(*sizes, format_of, dtype)
        else:
            fused, up_first = shape.gate != "parts", shape.gate == "up first"
            self.mlp = Mlp(*sizes, shape.mlp_bias, fused, format_of, dtype, up_first, shape.down_bias)
        self.mlp_norm = LayerNorm(shape.hidden_size, shape.norm_eps, dtype, shape.norm_bias)

    def _norm(self, layer: int, shape: EncoderShape, dtype: torch.dtype) -> LayerNorm | None:
        return LayerNorm(shape.hidden_size, shape.norm_eps, dtype, shape.norm_bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,  # of blocks that norm before; here x is all there is
        rotary: torch.Tensor | None,
        bias: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.attention_norm is not None
        x = self.attention_norm(self.attention(x, rotary, context, bias), x)
        return self.mlp_norm(self.mlp(x), x), None


class BlockNormedBefore(Block):
    """What goes into attention and feed-forward is normed, as in ModernBERT; the residual travels beside x."""

    def _norm(self, layer: int, shape: EncoderShape, dtype: torch.dtype) -> LayerNorm | None:
        # the embedding was normed just before the first layer
        return super()._norm(layer, shape, dtype) if layer else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: torch.Tensor | None,
        bias: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.attention_norm is None or residual is None:
            residual = x
        else:
            x, residual = self.attention_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, rotary, context, bias), residual)
        return self.mlp(x), residual
