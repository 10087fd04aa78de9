"""Decoder: an embedding, a list of blocks, a norm and a head. Families differ in the facts of a `DecoderShape`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from slipstream.cache_spec import CacheSpec, PagedSpec, WindowSpec
from slipstream.config.rope_info import RopeInfo
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.embedding import Embedding
from slipstream.nn.layers.layer import Layer
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import Mlp
from slipstream.nn.layers.norm import AllHeadsNorm, NoNorm, PerHeadNorm, RMSNorm
from slipstream.nn.layers.rope import Rope
from slipstream.nn.models.chained import ChainedLayers
from slipstream.nn.models.fused import FusedLayers
from slipstream.nn.models.pooling_heads import Heads
from slipstream.nn.weight_format import FormatOf, UnquantizedWeight, take_memory
from slipstream.ops.embedding_lookup import lookup_embedding_and_rope


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
    fused: bool = False  # the checkpoint has q, k and v as one tensor, gate and up as another
    qk_norm: Literal["none", "heads", "whole"] = "none"  # of queries and keys: each head, or all heads together
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_before: bool = True  # of what goes into attention and feed-forward
    norm_after: bool = False  # of what comes out of them
    norm_offset: float = 0.0  # added to the checkpoint's norm weights
    scale: float | None = None  # of attention scores; None: by the head's size
    score_cap: float = 0.0  # attention scores are bounded to this by tanh; 0: they are not
    logit_cap: float = 0.0  # likewise logits
    embedding_scale: float = 1.0
    windows: tuple[int, ...] = ()  # by layer, how many positions a token sees, itself among them; 0: all
    local_rope: RopeInfo | None = None  # of layers with a window, where they have their own
    causal: bool = True  # False: every token sees its whole text, or so many to each side as `windows` say
    headless: bool = False  # the checkpoint has no projection to tokens: it makes vectors or scores

    def cache_specs(self, page_size: int, itemsize: int) -> list[CacheSpec]:
        """In layer order. Where tokens see those after them, texts are computed whole and nothing is kept."""
        if not self.causal:
            return []
        sizes = (self.num_kv_heads, self.head_dim, itemsize, page_size)
        windows = self.windows or (0,) * self.num_layers
        return [WindowSpec(*sizes, window) if window else PagedSpec(*sizes) for window in windows]


class Decoder(nn.Module):
    """Laid out on the meta device, then given memory by `materialize` and filled by `nn/weights/load.py`."""

    def __init__(self, shape: DecoderShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        """`num_positions` is the longest context that will be run."""
        super().__init__()
        self.shape = shape
        self.heads: Heads | None = None  # what a checkpoint has for pooling; `load.py` gives it
        # rounded as the weights are, which is how it was in training
        self.embedding_scale = float(torch.tensor(shape.embedding_scale).to(dtype))
        with torch.device("meta"):
            self.embedding = Embedding(shape.vocab_size, shape.hidden_size, format_of("embedding"))
            self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions, num_positions, dtype)
            self.local_rope: Rope | None = None
            if shape.local_rope is not None:
                sizes = (shape.head_dim, shape.max_positions, num_positions)
                self.local_rope = Rope(shape.local_rope, *sizes, dtype, switches=False)
            self.layers = nn.ModuleList(Block(layer, shape, dtype, format_of) for layer in range(shape.num_layers))
            self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, dtype, shape.norm_offset)
            self.head: Linear | None = None
            if not shape.tied and not shape.headless:
                self.head = Linear(shape.hidden_size, {"": shape.vocab_size}, False, format_of("head"), dtype)
        self._chains = (FusedLayers(), ChainedLayers())
        self.eval()

    def materialize(self, device: torch.device) -> None:
        """Take memory on the device. Parameters hold nothing yet."""
        take_memory(self, device)
        self.rope.fill()
        if self.local_rope is not None:
            self.local_rope.fill()
        if self.heads is not None:
            self.heads.fill_buffers()

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        weight, scale = self.embedding.weight, self.embedding_scale
        rope_rows = batch.positions if batch.rope_rows is None else batch.rope_rows
        if type(weight) is UnquantizedWeight:
            x, rotary = lookup_embedding_and_rope(weight.data, batch.ids, scale, self.rope.table, rope_rows)
        else:
            x, rotary = self.embedding(batch.ids), self.rope(rope_rows)
            x = x if scale == 1.0 else x * scale
        local = rotary if self.local_rope is None else self.local_rope(batch.positions)
        for chain in self._chains:
            fused = chain.run(self, x, rotary, local, context)
            if fused is not None:
                return fused
        residual = last = None
        for block in self.layers:
            if context.only_last and block is self.layers[-1]:
                last = context.last_tokens()
            x, residual = block(x, residual, local if block.window else rotary, context, last)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def lm_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the projection to tokens, by token."""
        rows: torch.Tensor = self.embedding(ids) if self.head is None else self.head.weight.lookup(ids)
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert not self.shape.headless, "a checkpoint without a projection to tokens continues no text"
        logits: torch.Tensor = self.embedding.logits(hidden) if self.head is None else self.head(hidden)
        cap = self.shape.logit_cap
        return logits if not cap else torch.tanh(logits / cap) * cap

    def cache_specs(self, page_size: int, itemsize: int) -> list[CacheSpec]:
        return self.shape.cache_specs(page_size, itemsize)


class Block(Layer):
    """Attention and a feed-forward, with norms before or after each. The residual travels beside x and is added inside
    the norms before."""

    def __init__(self, layer: int, shape: DecoderShape, dtype: torch.dtype, format_of: FormatOf) -> None:
        super().__init__()
        name = f"layers.{layer}"
        self.window = shape.windows[layer] if shape.windows else 0

        def norm(wanted: bool) -> nn.Module | None:
            return RMSNorm(shape.hidden_size, shape.norm_eps, dtype, shape.norm_offset) if wanted else None

        self.attention_norm = norm(shape.norm_before) or NoNorm()
        self.attention = Attention(
            f"{name}.attention",
            layer,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            fused=shape.fused,
            scale=shape.head_dim**-0.5 if shape.scale is None else shape.scale,
            qk_norm=_qk_norm(shape, dtype),
            format_of=format_of,
            dtype=dtype,
            reach=None if shape.causal else self.window,
        )
        self.attention_out_norm = norm(shape.norm_after)
        self.mlp_norm = norm(shape.norm_before) or NoNorm()
        self.mlp = Mlp(
            f"{name}.mlp",
            shape.hidden_size,
            shape.ffn_size,
            shape.activation,
            shape.mlp_bias,
            shape.fused,
            format_of,
            dtype,
        )
        self.mlp_out_norm = norm(shape.norm_after)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: torch.Tensor,
        context: ForwardContext,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of all tokens; with `last` what comes out is theirs."""
        x, residual = self.attention.after_norm(self.attention_norm, x, residual, rotary, context, last)
        if self.attention_out_norm is not None:
            x, _ = self.attention_out_norm(x)
        x, residual = self.mlp.after_norm(self.mlp_norm, x, residual)
        if self.mlp_out_norm is not None:
            x, _ = self.mlp_out_norm(x)
        return x, residual


def _qk_norm(shape: DecoderShape, dtype: torch.dtype) -> PerHeadNorm | AllHeadsNorm | None:
    if shape.qk_norm == "none":
        return None
    kind = PerHeadNorm if shape.qk_norm == "heads" else AllHeadsNorm
    num_heads = {"q": shape.num_heads, "k": shape.num_kv_heads}
    return kind(num_heads, shape.head_dim, shape.norm_eps, dtype, shape.norm_offset)
