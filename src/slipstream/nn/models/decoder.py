"""Decoder: an embedding, a list of blocks, a norm and a head. Families differ in the facts of a `DecoderShape`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from slipstream.cache_spec import CacheSpec, PagedSpec
from slipstream.config.model_info import RopeInfo
from slipstream.nn.context import ForwardContext
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.embedding import Embedding
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import Mlp
from slipstream.nn.layers.norm import RMSNorm
from slipstream.nn.layers.rope import Rope
from slipstream.nn.quant import FormatOf


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """All that tells one decoder from another."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    activation: str
    norm_eps: float
    rope: RopeInfo
    max_positions: int  # that the model was made for
    tied: bool  # the embedding is the head
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def cache_specs(self, page_size: int, itemsize: int) -> list[CacheSpec]:
        """In layer order."""
        return [PagedSpec(self.num_kv_heads, self.head_dim, itemsize, page_size)] * self.num_layers


class Decoder(nn.Module):
    """Laid out on the meta device, then given memory by `materialize` and filled by `nn/weights/load.py`."""

    def __init__(self, shape: DecoderShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        """`num_positions` is the longest context that will be run."""
        super().__init__()
        self.shape = shape
        with torch.device("meta"):
            self.embedding = Embedding(shape.vocab_size, shape.hidden_size, format_of("embedding"))
            self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions, num_positions, dtype)
            self.layers = nn.ModuleList(Block(layer, shape, dtype, format_of) for layer in range(shape.num_layers))
            self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype)
            self.head: Linear | None = None
            if not shape.tied:
                self.head = Linear(shape.hidden_size, {"": shape.vocab_size}, False, format_of("head"), dtype)
        self.eval()

    def materialize(self, device: torch.device) -> None:
        """Take memory on the device. Parameters hold nothing yet."""
        self.to_empty(device=device)
        self.rope.fill()

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        x = self.embedding(batch.ids)
        rotary = self.rope(batch.positions)
        residual = None
        for block in self.layers:
            x, residual = block(x, residual, rotary, context)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.head is None:
            return self.embedding.logits(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits

    def cache_specs(self, page_size: int, itemsize: int) -> list[CacheSpec]:
        return self.shape.cache_specs(page_size, itemsize)


class Block(nn.Module):
    """Attention and a feed-forward, each after a norm. The residual travels beside x and is added inside the norms."""

    def __init__(self, layer: int, shape: DecoderShape, dtype: torch.dtype, format_of: FormatOf) -> None:
        super().__init__()
        name = f"layers.{layer}"
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype)
        self.attention = Attention(
            f"{name}.attention",
            layer,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            qk_norm_eps=shape.norm_eps if shape.qk_norm else None,
            format_of=format_of,
            dtype=dtype,
        )
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype)
        self.mlp = Mlp(
            f"{name}.mlp", shape.hidden_size, shape.ffn_size, shape.activation, shape.mlp_bias, format_of, dtype
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotary: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.attention_norm(x, residual)
        x = self.attention(x, rotary, context)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual
