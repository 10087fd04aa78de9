"""Encoder: an embedding and a list of blocks in which every token sees its whole text. Nothing is cached.

Families differ in the fields of an `EncoderShape`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import torch
from torch import nn

from slipstream.checkpoint.model_info import ModelSizes, RopeInfo
from slipstream.contracts.cache_spec import CacheSpec, StateSpec
from slipstream.nn.block import new_feed
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.embedding import Embedding
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import EncoderRMSNorm, LayerNorm
from slipstream.nn.layers.position_embedding import (
    Alibi,
    DisentangledScores,
    DisentangledShape,
    DistanceBias,
    RelativeEmbedding,
    RelativeKeys,
    Table,
)
from slipstream.nn.layers.rope import Rope
from slipstream.nn.pooling_heads import Heads
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape, sizes_of
from slipstream.nn.weights.weight_format import FormatOf, take_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The sizes and options by which one encoder differs from another."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ffn_size: int
    activation: str
    norm_eps: float
    max_positions: int  # of a text
    position_offset: int | None = None  # rows of the position table before position 0; None: no position table
    num_types: int = 0  # token types
    embedding_size: int = 0  # of the tables; 0: hidden_size
    # a product between embedding and layers, before or after the embedding's norm, with or without a bias
    projection: Literal["none", "before norm", "after norm"] = "none"
    projection_bias: bool = True
    embedding_norm: bool = True
    shares_layers: bool = False  # all layers have the same weights (ALBERT)
    num_buckets: int = 0  # buckets of distances with an attention bias (MPNet, T5); 0: no bias
    max_distance: int = 128  # from which on all distances are in the last bucket
    alibi: bool = False  # scores decrease with the distance, by a fixed slope per head (JinaBERT)
    disentangled: DisentangledShape | None = None  # DeBERTa
    relative: Literal["", "queries", "queries and keys"] = ""  # what is multiplied with a vector for each distance
    rope: RopeInfo | None = None
    local_rope: RopeInfo | None = None  # of layers with a reach
    reaches: tuple[int, ...] = ()  # per layer, how many tokens a token sees to each side; 0: all
    norm_before: bool = False  # norms of the inputs of attention and feed-forward, instead of output plus input
    norm_bias: bool = True
    norm_kind: Literal["layer", "rms"] = "layer"
    scale: float | None = None  # of attention scores; None: by the head size
    qk_norm: bool = False  # queries and keys are normed over all heads
    sums_twice: bool = False  # the input of attention is added to the normed sum again, with another norm (JinaBERT)
    fused: bool = False  # the checkpoint stores q, k and v as one tensor
    gate: Literal["none", "parts", "fused", "up first"] = "none"  # of the feed-forward: how the checkpoint stores it
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    down_bias: bool = True

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return tuple(
            LayerShape(
                mixers=(
                    AttentionShape(
                        num_heads=self.num_heads,
                        num_kv_heads=self.num_heads,
                        head_dim=self.head_dim,
                        scale=self.head_dim**-0.5 if self.scale is None else self.scale,
                        qkv_bias=self.qkv_bias,
                        output_bias=self.output_bias,
                        fused=self.fused,
                        qk_norm="whole" if self.qk_norm else "none",
                        causal=False,
                        window=reach,
                        rope=1 if reach and self.local_rope is not None else 0,
                    ),
                ),
                feed=MlpShape(
                    size=self.ffn_size,
                    activation=self.activation,
                    gated=self.gate != "none",
                    bias=self.mlp_bias,
                    down_bias=self.down_bias,
                    fused=self.gate in ("fused", "up first"),
                    up_first=self.gate == "up first",
                ),
                norm=NormShape(
                    eps=self.norm_eps, kind=self.norm_kind, bias=self.norm_kind == "layer" and self.norm_bias
                ),
                norm_before=self.norm_before,
                norm_after=not self.norm_before,
            )
            for reach in self.reaches or (0,) * self.num_layers
        )

    def sizes(self, on_cpu: bool) -> ModelSizes:
        found = sizes_of(self.layers, self.hidden_size, on_cpu)
        terms = 2 if self.disentangled is not None else {"": 0, "queries": 1, "queries and keys": 2}[self.relative]
        return msgspec.structs.replace(found, relative_terms=terms, relative_heads=self.num_heads if terms else 0)

    def cache_specs(self, page_size: int, dtype: str) -> list[CacheSpec]:
        """Each text is computed in one step, so nothing is cached."""
        return []

    def state_specs(self, dtype: str, num_drafts: int = 0, on_cpu: bool = True) -> list[StateSpec]:
        return []


class Encoder(nn.Module):
    """Built on the meta device; `materialize` allocates its memory and `nn/weights/load.py` fills it."""

    def __init__(self, shape: EncoderShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        """`num_positions` is the longest text that the engine runs."""
        super().__init__()
        self.shape = shape
        self.heads: Heads | None = None  # pooling heads of the checkpoint; set by `load.py`
        with torch.device("meta"):
            size = shape.embedding_size or shape.hidden_size
            self.embedding = Embedding(shape.vocab_size, size, format_of("embedding"))
            self.positions: Table | None = None
            if shape.position_offset is not None and not shape.relative:
                self.positions = Table(shape.max_positions, size, dtype, shape.position_offset)
            self.types: Table | None = None
            if shape.num_types:
                self.types = Table(shape.num_types, size, dtype)
            self.projection: Linear | None = None
            if shape.projection != "none":
                outputs = {"": shape.hidden_size}
                self.projection = Linear(size, outputs, shape.projection_bias, format_of("projection"), dtype)
            self.embedding_norm: EncoderNorm | None = None
            if shape.embedding_norm:
                normed = size if shape.projection == "after norm" else shape.hidden_size
                self.embedding_norm = _new_norm(shape, dtype, normed)
            self.distances: DistanceBias | Alibi | None = None
            if shape.num_buckets:
                self.distances = DistanceBias(
                    shape.num_buckets, shape.num_heads, num_positions, dtype, shape.max_distance
                )
            if shape.alibi:
                self.distances = Alibi(shape.num_heads, num_positions, dtype)
            self.relative: RelativeEmbedding | None = None
            if shape.disentangled is not None:
                self.relative = RelativeEmbedding(shape.disentangled, shape.hidden_size, num_positions, dtype)
            self.rope = self._rope(shape.rope, num_positions, dtype)
            self.local_rope = self._rope(shape.local_rope, num_positions, dtype, switches=False)
            block = EncoderBlockNormedBefore if shape.norm_before else EncoderBlock
            layout = Layout(shape.hidden_size, dtype, format_of)
            layers = shape.layers[:1] if shape.shares_layers else shape.layers
            blocks = [block(number, layer, shape, layout, num_positions) for number, layer in enumerate(layers)]
            self.layers = nn.ModuleList(blocks * shape.num_layers if shape.shares_layers else blocks)
            self.norm: EncoderNorm | None = None
            if shape.norm_before:
                self.norm = _new_norm(shape, dtype)
        self.eval()

    def _rope(
        self, info: RopeInfo | None, num_positions: int, dtype: torch.dtype, *, switches: bool = True
    ) -> Rope | None:
        sizes = (self.shape.head_dim, self.shape.max_positions, num_positions)
        return None if info is None else Rope(info, *sizes, dtype, switches=switches)

    def materialize(self, device: torch.device) -> None:
        """Allocate memory on the device. Parameters are uninitialised."""
        take_memory(self, device)
        for module in self.modules():
            if isinstance(module, Rope | DistanceBias | Alibi | RelativeEmbedding):
                module.fill()
        if self.heads is not None:
            self.heads.fill_buffers()

    def use_layers(self, layers: nn.ModuleList) -> None:
        """Run these layers from now on."""
        self.layers = layers

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        x = self._embed(batch)
        rope_rows = batch.positions if batch.rope_rows is None else batch.rope_rows
        rotary = () if self.rope is None else (self.rope(rope_rows),)
        if self.local_rope is not None:
            rotary = (*rotary, self.local_rope(batch.positions))
        context = context.with_rotary(rotary)
        bias = None if self.distances is None else self.distances()
        if self.relative is not None:
            context = replace(context, relative_positions=self.relative())
        residual = None
        for block in self.layers:
            x, residual = block(x, residual, bias, context)
        if self.norm is not None:
            x = self.norm(x, residual)
        return x

    def _embed(self, batch: BatchView) -> torch.Tensor:
        x: torch.Tensor = self.embedding.adapt(self.embedding(batch.ids), batch.ids, batch.lora)
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        if self.types is not None:
            # without token types all tokens have type 0
            x = x + (self.types.weight[0] if batch.token_types is None else self.types(batch.token_types))
        if self.projection is not None and self.shape.projection == "before norm":
            x = self.projection(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.projection(x) if self.projection is not None and self.shape.projection == "after norm" else x

    def lm_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the projection to tokens, which is the embedding, by token id."""
        return self.embedding(ids)


EncoderNorm = LayerNorm | EncoderRMSNorm


def _new_norm(shape: EncoderShape, dtype: torch.dtype, size: int = 0) -> EncoderNorm:
    """A norm of hidden states, or of `size` elements."""
    size = size or shape.hidden_size
    if shape.norm_kind == "rms":
        return EncoderRMSNorm(size, shape.norm_eps, dtype)
    return LayerNorm(size, shape.norm_eps, dtype, shape.norm_bias)


class EncoderBlock(Layer):
    """Attention and a feed-forward, each with a norm of its output plus its input, as in BERT."""

    def __init__(self, number: int, layer: LayerShape, shape: EncoderShape, layout: Layout, num_positions: int) -> None:
        super().__init__()
        self.shape = layer
        name = f"layers.{number}"
        relative: RelativeKeys | DisentangledScores | None = None
        if shape.disentangled is not None:
            relative = DisentangledScores(shape.num_heads, shape.head_dim)
        if shape.relative:
            # the checkpoint's count includes the rows before position 0
            positions = shape.max_positions + (shape.position_offset or 0)
            by_keys = shape.relative == "queries and keys"
            relative = RelativeKeys(positions, num_positions, shape.head_dim, by_keys, layout.dtype)
        (mixer,) = layer.mixers
        assert isinstance(mixer, AttentionShape)
        self.attention = Attention(f"{name}.{mixer.name}", mixer, layer.norm, None, layout, relative)
        self.attention_norm = self._norm(number, shape, layout.dtype)
        self.second_norm = _new_norm(shape, layout.dtype) if shape.sums_twice else None
        assert layer.feed is not None
        self.mlp = new_feed(name, layer.feed, layout)
        self.mlp_norm = _new_norm(shape, layout.dtype)

    def _norm(self, number: int, shape: EncoderShape, dtype: torch.dtype) -> EncoderNorm | None:
        return _new_norm(shape, dtype)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,  # used by blocks with norms before; here None
        bias: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.attention_norm is not None
        mixed = self.attention_norm(self.attention(x, context, None, bias), x)
        x = mixed if self.second_norm is None else self.second_norm(mixed, x)
        return self.mlp_norm(self.mlp(x, context), x), None


class EncoderBlockNormedBefore(EncoderBlock):
    """Norms of the inputs of attention and feed-forward, as in ModernBERT; the residual is passed beside x."""

    def _norm(self, number: int, shape: EncoderShape, dtype: torch.dtype) -> EncoderNorm | None:
        # the embedding may be normed just before the first layer
        return super()._norm(number, shape, dtype) if number or not shape.embedding_norm else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if residual is None:
            x, residual = x if self.attention_norm is None else self.attention_norm(x), x
        else:
            assert self.attention_norm is not None
            x, residual = self.attention_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, context, None, bias), residual)
        return self.mlp(x, context), residual
