"""Decoder: an embedding, a list of blocks, a norm and the projection to tokens, as a `DecoderShape` describes."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import torch
from torch import nn

from slipstream.nn.blocks.altup_block import AltUpBlock
from slipstream.nn.blocks.block import DecoderBlock
from slipstream.nn.blocks.choose import Implementation, choose_implementations
from slipstream.nn.blocks.parallel_block import ParallelBlock
from slipstream.nn.context import ForwardContext, LastTokens
from slipstream.nn.layers.altup import Streams
from slipstream.nn.layers.layer import Layout
from slipstream.nn.layers.layer_inputs import LayerInputs
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.norm import UnweightedNorm, new_norm
from slipstream.nn.layers.position_embedding import Table
from slipstream.nn.layers.query_scale import QueryScaleTable
from slipstream.nn.layers.rope import Rope
from slipstream.nn.layers.vocab_parallel import VocabParallelHead, new_embedding, new_token_head
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.pooling_heads import Heads
from slipstream.nn.shapes import LayerShape, tail_of
from slipstream.nn.streamed_layers import StreamedLayers
from slipstream.nn.weight_format import FormatOf, UnquantizedWeight, take_memory
from slipstream.ops.embedding_lookup import lookup_embedding_and_rope
from slipstream.ops.lora import LoraTiles, LoraWeights, add_lora


class Decoder(nn.Module):
    """Built on the meta device; `materialize` allocates its memory and `nn/weights/load.py` fills it."""

    def __init__(self, shape: DecoderShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        """`num_positions` is the longest context that the engine runs."""
        super().__init__()
        self.shape = shape
        self.heads: Heads | None = None  # pooling heads of the checkpoint; set by `load.py`
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
            self.streams = Streams("streams", shape.num_streams, layout) if shape.num_streams > 1 else None
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
        self.streamed: StreamedLayers | None = None  # layers whose weights are in host memory
        self.eval()

    def stream_layers(self, num_layers: int, device: torch.device) -> None:
        """Keep the weights of the last layers in host memory. Before `materialize`."""
        self.streamed = StreamedLayers(self.layers, num_layers, device)

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
        keeps_sums = bool(self.taps) or self.tail < len(layers) or self.streams is not None
        for block, following in zip_longest(layers, list(layers)[1:]):
            if type(block) is DecoderBlock:
                block.leave_sum_to(None if keeps_sums else following)
        self.implementations = ()
        if self.streamed is None:
            self.implementations = choose_implementations(list(layers), self.norm, self._tapped())  # type: ignore[arg-type]

    def forward(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        weight, scale = self.embedding.weight, self.embedding_scale
        rope_rows = batch.positions if batch.rope_rows is None else batch.rope_rows
        ropes = list(self.ropes)
        rotary: tuple[torch.Tensor, ...] = ()
        if ropes and type(weight) is UnquantizedWeight and self.shape.shard is None:
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
        if self.streams is not None:
            x = self.streams.split(x, context)
        for implementation in self.implementations:
            found = implementation.run(x, context)
            if found is not None:
                return found
        residual = last = None
        taps, inputs = self._tapped(), {}
        for number, block in enumerate(self.layers) if self.streamed is None else self.streamed.in_turn(self.layers):
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
        if self.streams is not None:
            x = self.streams.join(x, context)
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
