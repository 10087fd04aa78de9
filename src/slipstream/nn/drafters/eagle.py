"""EAGLE (versions 1 and 2): a draft head over the last hidden states of the target.

A projection of the token's embedding and the hidden state, side by side, then one layer of the Llama family without a
norm before its attention and without a norm after the layer. Its output takes the place of the target's hidden state:
for the projection to tokens, which is the target's, and as the feature of the next position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.base.errors import BadCheckpoint, InvalidOption
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.device.sync_check import sync_allowed
from slipstream.nn.context import ForwardContext, context_of
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.drafters.draft_head import DraftHead
from slipstream.nn.families.llama import llama_shape
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.embedding import Embedding, new_embedding, new_token_head
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import Mlp
from slipstream.nn.layers.norm import new_norm
from slipstream.nn.shapes import AttentionShape, MlpShape
from slipstream.nn.weights.source import Rules
from slipstream.nn.weights.weight_format import CheckpointTensor, FormatOf, WeightTarget


@dataclass(frozen=True, slots=True)
class EagleShape:
    decoder: DecoderShape  # of the one layer
    has_bias: bool  # of the projection of both inputs


class EagleHead(DraftHead):
    def __init__(self, shape: EagleShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        super().__init__(shape.decoder, num_positions, dtype)
        layer, size = shape.decoder.layers[0], shape.decoder.hidden_size
        attention, mlp = layer.mixers[0], layer.feed
        assert isinstance(attention, AttentionShape) and isinstance(mlp, MlpShape)
        layout = Layout(size, dtype, format_of)
        with torch.device("meta"):
            self.fc = Linear(2 * size, {"": size}, shape.has_bias, format_of("fc"), dtype)
            self.attention = Attention("attention", attention, layer.norm, 0, layout)
            self.mlp_norm = new_norm(size, layer.norm, dtype)
            self.mlp = Mlp("mlp", mlp, layout)

    def store_inputs(self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext) -> None:
        self.attention.store(self.fc(torch.cat([embeds, features], 1), context), context)

    def run(
        self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.fc(torch.cat([embeds, features], 1), context)
        last = context.last_tokens() if context.only_last else None
        x = self.attention(residual, context, last)
        residual = residual if last is None else last.of(residual)
        x, residual = self.mlp.after_norm(self.mlp_norm, x, residual, context_of(context, last))
        total = x + residual
        return total, total


def eagle_shape(info: ModelInfo, target: DecoderShape, stored: Sequence[str] | None) -> EagleShape:
    """`info`: of the head; `stored`: the names of its tensors, None if they are random. Raises InvalidOption if the
    head cannot draft for the target, KeyError with the name of a tensor that no such head has."""
    for what, own, wanted in (
        ("a hidden size of", info.hidden_size, target.hidden_size),
        ("a vocabulary of", info.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise InvalidOption(f"the EAGLE head is for {what} {own}, and the model has {wanted}; give its own head")
    if info.num_layers != 1:
        raise InvalidOption(f"the EAGLE head has {info.num_layers} layers; heads of one layer run here")
    if target.num_copies > 1:
        raise InvalidOption("EAGLE heads are not supported for models with several hidden states per token")
    if info.extra.get("add_para_norm"):
        raise InvalidOption(
            "the EAGLE head has add_para_norm in config.json, which is not supported; give another head"
        )
    ours = {eagle_rules().rename(name) for name in stored or ()}
    shape = llama_shape(info)
    # positions of the engine, whatever the head was trained with
    decoder = replace(shape, layers=shape.layers[:1], tied=False, max_positions=info.max_positions)
    return EagleShape(decoder, has_bias="fc.bias" in ours)


def eagle_rules() -> Rules:
    names: dict[str, str | None] = {
        "fc.{kind}": "fc.{kind}",
        "layers.0.post_attention_layernorm.weight": "mlp_norm.weight",
        "layers.0.self_attn.o_proj.{kind}": "attention.output.{kind}",
        "layers.0.self_attn.{part}_proj.{kind}": "attention.qkv.{part}.{kind}",
        "layers.0.mlp.down_proj.{kind}": "mlp.down.{kind}",
        "layers.0.mlp.{part}_proj.{kind}": "mlp.gate_up.{part}.{kind}",
        "layers.0.self_attn.rotary_emb.inv_freq": None,
        # copies of the target's
        "embed_tokens.weight": None,
        "lm_head.weight": None,
    }
    return Rules(names | {f"model.{stored}": target for stored, target in names.items()})


# EAGLE-3: a draft head over the hidden states that go into three layers of the target.
#
# A projection makes one feature of the three. The layer's attention reads the norms of the embedding and of the feature
# side by side; the feature is also its residual. Most heads draft from a smaller vocabulary, whose tokens `d2t` maps to
# the target's.


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    decoder: DecoderShape  # of the one layer
    draft_vocab: int  # tokens that it drafts
    norm_before_residual: bool  # the residual is the feature after its norm
    own_embedding: bool
    own_head: bool
    maps_tokens: bool


class Eagle3Head(DraftHead):
    def __init__(self, shape: Eagle3Shape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        super().__init__(shape.decoder, num_positions, dtype)
        self.norm_before_residual = shape.norm_before_residual
        layer, size = shape.decoder.layers[0], shape.decoder.hidden_size
        attention, mlp = layer.mixers[0], layer.feed
        assert isinstance(attention, AttentionShape) and isinstance(mlp, MlpShape)
        layout = Layout(size, dtype, format_of)
        with torch.device("meta"):
            self.norm = new_norm(size, shape.decoder.norm, dtype)
            self.fc = Linear(3 * size, {"": size}, False, format_of("fc"), dtype)
            self.input_norm, self.hidden_norm, self.mlp_norm = (new_norm(size, layer.norm, dtype) for _ in range(3))
            self.attention = Attention("attention", attention, layer.norm, 0, layout, num_inputs=2 * size)
            self.mlp = Mlp("mlp", mlp, layout)
            vocab = shape.decoder.vocab_size
            self.embedding: Embedding | None = None
            if shape.own_embedding:
                self.embedding = new_embedding(vocab, size, format_of("embedding"), shape.decoder.shard)
            self.head: Linear | None = None
            if shape.own_head:
                self.head = new_token_head(
                    size, shape.draft_vocab, False, format_of("head"), dtype, shape.decoder.shard
                )
            self.tokens = TokenMap(shape.draft_vocab, vocab) if shape.maps_tokens else None

    def materialize(self, device: torch.device) -> None:
        super().materialize(device)
        if self.tokens is not None:
            self.tokens.d2t.zero_()  # steps run before the weights are read

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        inputs: torch.Tensor = self.fc(hidden[:, self.shape.hidden_size :].contiguous())
        return inputs

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) if self.embedding is None else self.embedding(ids)

    def store_inputs(self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext) -> None:
        both = torch.cat([self.input_norm(embeds)[0], self.hidden_norm(features)[0]], 1)
        self.attention.store(both, context)

    def run(
        self, embeds: torch.Tensor, features: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(features)[0]
        both = torch.cat([self.input_norm(embeds)[0], normed], 1)
        residual = normed if self.norm_before_residual else features
        last = context.last_tokens() if context.only_last else None
        x = self.attention(both, context, last)
        residual = residual if last is None else last.of(residual)
        x, residual = self.mlp.after_norm(self.mlp_norm, x, residual, context_of(context, last))
        hidden, total = self.norm(x, residual)
        return hidden, total

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.target.logits(hidden) if self.head is None else self.head(hidden)
        found = logits.argmax(1)
        return found if self.tokens is None else self.tokens(found)


class TokenMap(Layer):
    """From tokens of a draft vocabulary to the target's: `d2t` [draft tokens] is what is added to each."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("d2t", torch.empty(num_tokens, dtype=torch.int64))

    d2t: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + self.d2t.index_select(0, ids)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        yield "d2t", WeightTarget(tuple(self.d2t.shape), self._fill)

    def _fill(self, piece: CheckpointTensor) -> None:
        with sync_allowed("weights are loaded before steps run"):
            added = piece.read().long().cpu()
            mapped = added + torch.arange(len(added))
            first, last = (int(mapped.min()), int(mapped.max())) if len(mapped) else (0, 0)
        if first < 0 or last >= self.vocab_size:
            raise BadCheckpoint(
                f"d2t of the EAGLE-3 head maps draft tokens to {first} to {last}, and the model has {self.vocab_size} "
                "tokens; check that head and model belong together"
            )
        self.d2t.copy_(added)


def eagle3_shape(info: ModelInfo, target: DecoderShape, stored: Sequence[str] | None) -> Eagle3Shape:
    """`info`: of the head; `stored`: the names of its tensors, None if they are random. Raises InvalidOption if the
    head cannot draft for the target."""
    _check(info, target)
    vocab = int(info.extra.get("draft_vocab_size") or info.vocab_size)
    own = {eagle3_rules().rename(name) for name in stored or ()}
    own_head = stored is None or any(name is not None and name.startswith("head.") for name in own)
    if vocab != info.vocab_size and not own_head:
        raise InvalidOption(
            f"the EAGLE-3 head has a draft_vocab_size of {vocab} and no lm_head.weight of its own; download it again"
        )
    shape = llama_shape(info)
    # positions of the engine, whatever the head was trained with
    decoder = replace(shape, layers=shape.layers[:1], tied=False, max_positions=info.max_positions)
    return Eagle3Shape(
        decoder,
        vocab,
        norm_before_residual=bool(info.extra.get("norm_before_residual")),
        own_embedding="embedding.weight" in own,
        own_head=own_head,
        maps_tokens=vocab != info.vocab_size,
    )


def _check(info: ModelInfo, target: DecoderShape) -> None:
    if info.hidden_size != target.hidden_size:
        raise InvalidOption(
            f"the EAGLE-3 head is for a hidden size of {info.hidden_size}, and the model has {target.hidden_size}; "
            "give the head of this model"
        )
    if info.vocab_size != target.vocab_size:
        raise InvalidOption(
            f"the EAGLE-3 head is for a vocabulary of {info.vocab_size} tokens, and the model has {target.vocab_size}; "
            "give the head of this model"
        )
    if info.num_layers != 1:
        raise InvalidOption(f"the EAGLE-3 head has {info.num_layers} layers; heads of one layer run here")
    if target.num_copies > 1:
        raise InvalidOption("EAGLE-3 heads are not supported for models with several hidden states per token")
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if info.extra.get(name):
            raise InvalidOption(
                f"the EAGLE-3 head has {name} in config.json, which is not supported; give another head"
            )


def tapped_layers(info: ModelInfo, num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads: those of its config, else the usual ones."""
    own = info.extra.get("eagle_config")
    found = info.extra.get("eagle_aux_hidden_state_layer_ids")
    if found is None and isinstance(own, dict):
        found = own.get("eagle_aux_hidden_state_layer_ids")
    layers = (2, num_layers // 2, num_layers - 3) if found is None else tuple(found)
    if len(layers) != 3 or not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers):
        raise InvalidOption(
            f"the EAGLE-3 head reads the inputs of layers {layers}; it must be 3 of the model's {num_layers} layers"
        )
    return layers


def eagle3_rules() -> Rules:
    layer: dict[str, str | None] = {
        "input_layernorm.weight": "input_norm.weight",
        "hidden_norm.weight": "hidden_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "self_attn.o_proj.{kind}": "attention.output.{kind}",
        "self_attn.{part}_proj.{kind}": "attention.qkv.{part}.{kind}",
        "mlp.down_proj.{kind}": "mlp.down.{kind}",
        "mlp.{part}_proj.{kind}": "mlp.gate_up.{part}.{kind}",
        "self_attn.rotary_emb.inv_freq": None,
    }
    names: dict[str, str | None] = {
        "fc.{kind}": "fc.{kind}",
        "norm.weight": "norm.weight",
        "lm_head.{kind}": "head.{kind}",
        "embed_tokens.weight": "embedding.weight",
        "d2t": "tokens.d2t",
        "draft_id_to_target_id": "tokens.d2t",
        "t2d": None,
    }
    for root in ("midlayer", "layers.0"):
        names |= {f"{root}.{stored}": name for stored, name in layer.items()}
    return Rules(names | {f"model.{stored}": name for stored, name in names.items()})
