"""Decoder: an embedding, a list of blocks, a norm and the projection to tokens, as a `DecoderShape` describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from typing import Literal, Protocol

import msgspec
import torch
from torch import nn

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelSizes, RopeInfo
from slipstream.contracts.cache_spec import CacheSpec, PagedSpec, StateSpec, WindowSpec
from slipstream.nn.altup import AltUpBlock, AltupCopies
from slipstream.nn.block import DecoderBlock, ParallelBlock
from slipstream.nn.chains import Implementation, choose_implementations
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.embedding import LayerInputs, VocabParallelHead, new_embedding, new_token_head
from slipstream.nn.layers.layer import Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import UnweightedNorm, new_norm
from slipstream.nn.layers.position_embedding import Table
from slipstream.nn.layers.rope import QueryScaleTable, Rope
from slipstream.nn.pooling_heads import Heads
from slipstream.nn.shapes import (
    AttentionShape,
    LayerInputsShape,
    LayerShape,
    MixerShape,
    NormShape,
    QueryScale,
    Shard,
    sizes_of,
    tail_of,
)
from slipstream.nn.towers.tower import Tower
from slipstream.nn.weights.offloaded_layers import OffloadedLayers
from slipstream.nn.weights.weight_format import FormatOf, UnquantizedWeight, take_memory
from slipstream.ops.elementwise import lookup_embedding_and_rope
from slipstream.ops.gemm.lora import LoraTiles, LoraWeights, add_lora


class Decoder(nn.Module):
    """Built on the meta device; `materialize` allocates its memory and `nn/weights/load.py` fills it."""

    def __init__(self, shape: DecoderShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        """`num_positions` is the longest context that the engine runs."""
        super().__init__()
        self.shape = shape
        self.heads: Heads | None = None  # pooling heads of the checkpoint; set by `load.py`
        self.tower: Tower | None = None  # of a model that sees pictures; set by `load.py`
        self.head_lora: LoraWeights | None = None  # adapters of the projection to tokens, by slot; None: it has none
        # rounded to the weights' dtype, as in training
        self.embedding_scale = float(torch.tensor(shape.embedding_scale, dtype=dtype))
        layout = Layout(shape.hidden_size, dtype, format_of)
        with torch.device("meta"):
            bias = dtype if shape.head_bias and shape.tied and not shape.headless else None
            self.embedding = new_embedding(
                shape.vocab_size, shape.hidden_size, format_of("embedding"), shape.shard, bias
            )
            self.ropes = nn.ModuleList(
                Rope(rope.info, rope.head_dim, shape.max_positions, num_positions, dtype, switches=rope.switches)
                for rope in shape.ropes
            )
            self.layers = nn.ModuleList(
                _block_of(layer)(number, layer, sites, state_sites, layout)
                for number, (layer, sites, state_sites) in enumerate(
                    zip(shape.layers, shape.sites, shape.state_sites, strict=True)
                )
            )
            self.layer_inputs: LayerInputs | None = None
            if shape.layer_inputs is not None:
                self.layer_inputs = LayerInputs("layer_inputs", shape.layer_inputs, shape.norm, layout)
            self.copies = AltupCopies("copies", shape.num_copies, layout) if shape.num_copies > 1 else None
            self.positions: Table | None = None
            if shape.num_position_rows:
                self.positions = Table(shape.num_position_rows, shape.hidden_size, dtype)
            self.query_scale: QueryScaleTable | None = None
            if shape.query_scale is not None:
                self.query_scale = QueryScaleTable(shape.query_scale, num_positions, dtype)
            self.norm = new_norm(shape.hidden_size, shape.norm, dtype)
            self.head: Linear | None = None
            if not shape.tied and not shape.headless:
                self.head = new_token_head(
                    shape.hidden_size, shape.vocab_size, shape.head_bias, format_of("head"), dtype, shape.shard
                )
        self.tail = tail_of(shape.layers)
        self.taps: tuple[int, ...] = ()
        self.implementations: tuple[Implementation, ...] = ()
        self.offloaded: OffloadedLayers | None = None  # layers whose weights are in host memory
        self.eval()

    def offload_layers(self, num_layers: int, device: torch.device) -> None:
        """Keep the weights of the last layers in host memory. Before `materialize`."""
        self.offloaded = OffloadedLayers(self.layers, num_layers, device)

    def materialize(self, device: torch.device) -> None:
        """Allocate memory on the device. Parameters are uninitialised."""
        take_memory(self, device)
        for rope in self.ropes:
            rope.fill()
        for module in self.modules():
            if isinstance(module, UnweightedNorm):
                module.fill_buffers()
        if self.query_scale is not None:
            self.query_scale.fill()
        if self.heads is not None:
            self.heads.fill_buffers()
        if self.tower is not None:
            self.tower.fill_buffers()
        self.use_layers(self.layers)

    def tap(self, layers: tuple[int, ...]) -> None:
        """From now on return the inputs of these layers beside the hidden states, [T, (1 + layers) * hidden], for a
        drafter. Steps return all tokens then, and not only the last of each row."""
        self.taps = layers
        self.use_layers(self.layers)

    def use_layers(self, layers: nn.ModuleList) -> None:
        """Run these layers from now on, by the implementations that can."""
        self.layers = layers
        self.tail = tail_of([block.shape for block in layers])  # type: ignore[misc]
        keeps_sums = bool(self.taps) or self.tail < len(layers) or self.copies is not None
        for block, following in zip_longest(layers, list(layers)[1:]):
            if type(block) is DecoderBlock:
                block.leave_sum_to(None if keeps_sums else following)
        self.implementations = ()
        if self.offloaded is None:
            self.implementations = choose_implementations(list(layers), self.norm, self._tapped())  # type: ignore[arg-type]

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        weight, scale = self.embedding.weight, self.embedding_scale
        rope_rows = batch.positions if batch.rope_rows is None else batch.rope_rows
        ropes = list(self.ropes)
        rotary: tuple[torch.Tensor, ...] = ()
        if ropes and type(weight) is UnquantizedWeight and self.shape.shard is None and rope_rows.dim() == 1:
            x, found = lookup_embedding_and_rope(weight.data, batch.ids, scale, ropes.pop(0).table, rope_rows)
            rotary = (found,)
        else:
            x = self.embedding(batch.ids)
            x = x if scale == 1.0 else x * scale
        x = self.embedding.adapt(x, batch.ids, batch.lora, scale)
        if batch.embeds is not None:
            batch.embeds.write_to(x)
        rotary += tuple(rope(rope_rows if rope.switches else batch.positions) for rope in ropes)
        context = context.with_rotary(rotary)
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        if self.query_scale is not None:
            context = replace(context, query_scale=self.query_scale(batch.positions))
        if self.layer_inputs is not None:
            given = self.layer_inputs(batch.ids, x, context, self._num_input_layers(context))
            context, embedded = replace(context, layer_inputs=given), x
        if self.copies is not None:
            x = self.copies.split(x, context)
        adds = batch.embeds is not None and batch.embeds.added is not None
        for implementation in () if adds else self.implementations:
            found = implementation.run(x, context)
            if found is not None:
                return found
        residual = last = None
        taps, inputs = self._tapped(), {}
        for number, block in enumerate(self.layers) if self.offloaded is None else self.offloaded.in_turn(self.layers):
            if number in taps:
                inputs[number] = x.clone() if residual is None else x + residual
            if context.only_last and number == self.tail:
                # from here on no layer stores keys or values of the other tokens
                chosen = context.last_tokens(with_rotary=True)
                x, residual, context = chosen.of(x), _of(chosen, residual), chosen.context
                if self.layer_inputs is not None:
                    given = self.layer_inputs(chosen.of(batch.ids), chosen.of(embedded), context)
                    context = replace(context, layer_inputs=given)
            elif context.only_last and number == len(self.layers) - 1:
                last = context.last_tokens()
            x, residual = block(x, residual, context, last)
            if adds and number < len(self.layers) - 1:
                assert batch.embeds is not None and residual is not None and not self.copies, "no such family"
                residual = batch.embeds.add_to(residual, number)
        if self.copies is not None:
            x = self.copies.join(x, context)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return torch.cat([hidden, *(inputs[number] for number in taps)], 1) if taps else hidden

    def _num_input_layers(self, context: ForwardContext) -> int | None:
        """How many layers need per-layer inputs of all tokens; None: all. The others need those of the last tokens."""
        is_whole = len(self.layers) == len(self.shape.layers)  # a warm-up runs fewer
        return self.tail if context.only_last and is_whole and self.tail < len(self.layers) else None

    def _tapped(self) -> tuple[int, ...]:
        """The tapped layers; during a warm-up with fewer layers the last one instead of those that are missing."""
        return tuple(min(number, len(self.layers) - 1) for number in self.taps)

    def lm_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the projection to tokens, by token id."""
        if isinstance(self.head, VocabParallelHead):
            return self.head.rows(ids)
        rows: torch.Tensor = self.embedding(ids) if self.head is None else self.head.weight.lookup(ids)
        return rows

    def logits(self, hidden: torch.Tensor, tiles: LoraTiles | None = None) -> torch.Tensor:
        """`tiles`: the hidden states whose requests have an adapter."""
        assert not self.shape.headless, "a checkpoint without a projection to tokens generates no text"
        if self.taps:
            hidden = hidden[:, : self.shape.hidden_size].contiguous()
        logits: torch.Tensor = self.embedding.logits(hidden) if self.head is None else self.head(hidden)
        if tiles is not None and self.head_lora is not None:
            logits = add_lora(logits, hidden, self.head_lora, tiles)
        cap, scale = self.shape.logit_cap, self.shape.logit_scale
        logits = logits if scale == 1.0 else logits * scale
        return logits if not cap else torch.tanh(logits / cap) * cap


def _block_of(layer: LayerShape) -> type[DecoderBlock]:
    if layer.altup is not None:
        return AltUpBlock
    return DecoderBlock if layer.parallel == "no" else ParallelBlock


def _of(last: LastTokens, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else last.of(x)


# DecoderShape: the sizes and options by which one decoder differs from another, as plain data.

_MANY_DRAFTS = 64  # rings of inputs are larger than without drafts; for few drafts they may have the same size


@dataclass(frozen=True, slots=True)
class RopeShape:
    info: RopeInfo
    head_dim: int
    switches: bool = True  # the batch chooses between two sets of frequencies per token (LongRoPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    ropes: tuple[RopeShape, ...]  # mixers refer to them by index; empty: no mixer is attention
    norm: NormShape  # of the last hidden states
    max_positions: int  # that the model was trained for
    tied: bool  # the embedding is also the projection to tokens
    layer_inputs: LayerInputsShape | None = None
    logit_cap: float = 0.0  # logits become logit_cap * tanh(logit / logit_cap); 0: they stay as they are
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False  # of the projection to tokens
    num_position_rows: int = 0  # of a table whose row for each position is added to the embedding (GPT-2); 0: no table
    # endings of names of weights that the checkpoint stores as [inputs, outputs]
    transposed: tuple[str, ...] = ()
    # stacked experts of the checkpoint are [experts, inputs, outputs], and how gate and up lie in them
    transposed_experts: Literal["no", "interleaved", "halves"] = "no"
    shard: Shard | None = None  # the rank that has a part of the vocabulary, whose size stays that of all ranks
    headless: bool = False  # the checkpoint has no projection to tokens: it gives vectors or scores

    @property
    def mixers(self) -> tuple[MixerShape, ...]:
        """The mixers of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def num_copies(self) -> int:
        """Hidden states of a token between layers."""
        return max((layer.altup.num_copies for layer in self.layers if layer.altup is not None), default=1)

    @property
    def causal(self) -> bool:
        """False: every token sees its whole text. Texts are then computed in one step and nothing is cached."""
        return all(mixer.causal for mixer in self.mixers)

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """The mixers that are attention, in order."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, AttentionShape))

    @property
    def query_scale(self) -> QueryScale | None:
        """The scale of the queries of all layers."""
        found = {mixer.query_scale for mixer in self.attentions}
        assert len(found) <= 1, "layers with different query scales are not supported"
        return next(iter(found), None)

    def map_attention(self, change: Callable[[AttentionShape], AttentionShape]) -> DecoderShape:
        """The same model with its attention mixers changed."""

        def changed(mixer: MixerShape) -> MixerShape:
            return change(mixer) if isinstance(mixer, AttentionShape) else mixer

        layers = (replace(layer, mixers=tuple(map(changed, layer.mixers))) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def sites(self) -> tuple[tuple[int | None, ...], ...]:
        """Per layer and mixer, the number of the cache site that it reads; None: it has no cache. Raises
        UnsupportedModel for a `kv_source` whose site it cannot read."""
        next_site = count()
        sites: list[tuple[int | None, ...]] = []
        for number, layer in enumerate(self.layers):
            own = [next(next_site) if mixer.has_own_site else None for mixer in layer.mixers]
            for index, mixer in enumerate(layer.mixers):
                if isinstance(mixer, AttentionShape) and mixer.kv_source is not None:
                    self._check_source(number, mixer)
                    own[index] = sites[mixer.kv_source][0]
            sites.append(tuple(own))
        return tuple(sites)

    def cache_specs(self, page_size: int, dtype: str) -> list[CacheSpec]:
        """A spec per cache site. Keys and values are stored in `dtype`."""
        return [_cache_spec(mixer, page_size, dtype) for mixer in self.attentions if mixer.has_own_site]

    @property
    def state_sites(self) -> tuple[tuple[int | None, ...], ...]:
        """Per layer and mixer, the number of its state site; None: it has no recurrent state."""
        next_site = count()
        # whether a mixer has a state does not depend on the dtype
        return tuple(
            tuple(next(next_site) if mixer.state_fields("float32") else None for mixer in layer.mixers)
            for layer in self.layers
        )

    def state_specs(self, dtype: str, num_drafts: int = 0, on_cpu: bool = True) -> list[StateSpec]:
        """A spec per state site, for a model of this dtype and up to `num_drafts` drafts per row and step."""
        for mixer in self.mixers if num_drafts else ():
            plain = mixer.state_fields(dtype)
            if plain and plain == mixer.state_fields(dtype, _MANY_DRAFTS):
                raise UnsupportedModel(
                    f"{mixer.name} keeps no inputs to undo rejected drafts; remove speculative_config"
                )
        defers = not on_cpu and not num_drafts
        found = ((mixer, mixer.state_fields(dtype, num_drafts)) for mixer in self.mixers)
        return [
            StateSpec((*fields, *mixer.deferred_fields(dtype)) if defers else fields, mixer.chunk_rounding)
            for mixer, fields in found
            if fields
        ]

    def sizes(self, on_cpu: bool) -> ModelSizes:
        return sizes_of(self.layers, self.hidden_size, on_cpu)

    def _check_source(self, number: int, mixer: AttentionShape) -> None:
        source = mixer.kv_source
        assert source is not None
        found = self.layers[source].mixers[:1] if 0 <= source < number else ()
        if not found or not isinstance(found[0], AttentionShape) or not found[0].has_own_site:
            raise UnsupportedModel(
                f"layer {number} reads the keys and values of layer {source}; "
                "it must be an earlier layer that stores its own"
            )
        if _cache_spec(found[0], 1, "float32") != _cache_spec(mixer, 1, "float32"):
            raise UnsupportedModel(
                f"layer {number} reads the keys and values of layer {source}, "
                "which has other heads, another window, another soft cap or other sinks; they must be the same"
            )


def _cache_spec(mixer: AttentionShape, page_size: int, dtype: str) -> CacheSpec:
    spec = PagedSpec(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        dtype=dtype,
        page_size=page_size,
        soft_cap=mixer.soft_cap,
        sinks=mixer.sinks,
        value_dim=0 if mixer.latent is None else mixer.latent.kv_rank,
    )
    return WindowSpec(**msgspec.structs.asdict(spec), window=mixer.window) if mixer.window else spec


# The interface between the runner and a generating model.


class CausalLM(Protocol):
    def __call__(self, context: ForwardContext) -> torch.Tensor:
        """The step's tokens to hidden states [T, hidden]; with `only_last` [B, hidden]."""

    def logits(self, hidden: torch.Tensor, tiles: LoraTiles | None = None) -> torch.Tensor:
        """Hidden states [S, hidden] to [S, vocabulary], in the model's dtype. `tiles`: those with an adapter."""
