"""EAGLE (versions 1 and 2): a draft head over the last hidden states of the target.

A projection of the token's embedding and the hidden state, side by side, then one layer of the Llama family without a
norm before its attention and without a norm after the layer. Its output takes the place of the target's hidden state:
for the projection to tokens, which is the target's, and as the feature of the next position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.base.errors import InvalidOption
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.context import ForwardContext, context_of
from slipstream.nn.layers.attention import Attention
from slipstream.nn.layers.layer import Layout
from slipstream.nn.layers.linear import Linear
from slipstream.nn.layers.mlp import Mlp
from slipstream.nn.layers.norm import new_norm
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.draft_head import DraftHead
from slipstream.nn.models.llama import llama_shape
from slipstream.nn.shapes import AttentionShape, MlpShape
from slipstream.nn.weight_format import FormatOf
from slipstream.nn.weights.rules import Rules


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
    if target.num_streams > 1:
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
