"""DFlash: a block drafter, a small decoder that drafts all tokens of a block in one pass.

The block is the token that a row drew last, then mask tokens, one for each draft. Its tokens see each other in both
directions and the context: the target's hidden states after several layers, which `fc` and `hidden_norm` turn into one
feature per position. Every layer projects the features to keys and values of its own and stores them in its cache, so
context positions have no queries. Embedding and projection to tokens are the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slipstream.base.errors import InvalidOption
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.nn.context import ForwardContext
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.drafters.draft_head import AttachedModel
from slipstream.nn.families.llama import llama_attention, llama_shape
from slipstream.nn.layers.attention import stored_parts_of_heads
from slipstream.nn.layers.layer import Layer, Layout
from slipstream.nn.layers.linear import Linear, new_output
from slipstream.nn.layers.mlp import Mlp
from slipstream.nn.layers.norm import PerHeadNorm, new_norm
from slipstream.nn.shapes import AttentionShape, LayerShape, MlpShape, NormShape, has_only
from slipstream.nn.weights.source import Rules
from slipstream.nn.weights.weight_format import FormatOf
from slipstream.ops.attention import norm_rope, rope_and_write_cache, write_cache


@dataclass(frozen=True, slots=True)
class DFlashShape:
    decoder: DecoderShape
    num_features: int  # layers of the target whose outputs make a feature
    causal: tuple[bool, ...]  # per layer: a token of the block does not see those after it
    mask_token: int
    embedding_scale: float


class DFlashModel(AttachedModel):
    def __init__(self, shape: DFlashShape, num_positions: int, dtype: torch.dtype, format_of: FormatOf) -> None:
        super().__init__(shape.decoder, num_positions, dtype)
        self.causal = shape.causal
        self.mask_token = shape.mask_token
        self.embedding_scale = shape.embedding_scale
        size, norm = shape.decoder.hidden_size, shape.decoder.norm
        layout = Layout(size, dtype, format_of)
        with torch.device("meta"):
            self.fc = Linear(shape.num_features * size, {"": size}, False, format_of("fc"), dtype)
            self.hidden_norm, self.norm = (new_norm(size, norm, dtype) for _ in range(2))
            self.layers = nn.ModuleList(
                DFlashLayer(number, layer, layout) for number, layer in enumerate(shape.decoder.layers)
            )

    def write_context(self, hidden: torch.Tensor, context: ForwardContext) -> None:
        """Stores keys and values of each token of a step. `hidden` [T, (1 + features) * hidden]: what the tapped target
        returns."""
        features = self.fc(hidden[:, self.shape.hidden_size :].contiguous(), context)
        features = self.hidden_norm(features)[0]
        context = self._rotated(context)
        for layer in self.layers:
            layer.attention.write(features, context)  # type: ignore[union-attr, operator]

    def forward(self, both: ForwardContext, causal: ForwardContext | None) -> torch.Tensor:
        """Hidden states [T, hidden] of blocks, for `draft`. `both`: each token sees its whole block; `causal`: the same
        tokens, which see the block up to themselves; None if no layer is causal."""
        x: torch.Tensor = self.target.embedding(both.batch.ids)
        x = x if self.embedding_scale == 1.0 else x * self.embedding_scale
        both = self._rotated(both)
        causal = None if causal is None else self._rotated(causal)
        residual = None
        for layer, is_causal in zip(self.layers, self.causal, strict=True):
            context = causal if is_causal else both
            assert context is not None, "a causal layer needs a context of its own"
            x, residual = layer(x, residual, context)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def _rotated(self, context: ForwardContext) -> ForwardContext:
        return context.with_rotary(tuple(rope(context.batch.positions) for rope in self.ropes))


class DFlashLayer(Layer):
    def __init__(self, number: int, shape: LayerShape, layout: Layout) -> None:
        super().__init__()
        name, attention, mlp = f"layers.{number}", shape.mixers[0], shape.feed
        assert isinstance(attention, AttentionShape) and isinstance(mlp, MlpShape)
        self.attention_norm, self.mlp_norm = (new_norm(layout.hidden_size, shape.norm, layout.dtype) for _ in range(2))
        self.attention = BlockAttention(f"{name}.attention", attention, shape.norm, number, layout)
        self.mlp = Mlp(f"{name}.mlp", mlp, layout)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.attention_norm(x, residual)
        return self.mlp.after_norm(self.mlp_norm, self.attention(normed, context), residual, context)


def dflash_shape(info: ModelInfo, target: DecoderShape, stored: Sequence[str] | None) -> DFlashShape:
    """`info`: of the drafter; `stored`: the names of its tensors, None if they are random. Raises InvalidOption if it
    cannot draft for the target, KeyError with the name of a tensor that no such drafter has."""
    for what, own, wanted in (
        ("a hidden size of", info.hidden_size, target.hidden_size),
        ("a hidden size of", info.extra.get("target_hidden_size") or info.hidden_size, target.hidden_size),
        ("a vocabulary of", info.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise InvalidOption(
                f"the DFlash drafter is for {what} {own}, and the model has {wanted}; give the drafter of this model"
            )
    if target.num_copies > 1:
        raise InvalidOption("DFlash drafters are not supported for models with several hidden states per token")
    _refuse_variants(info)
    for name in stored or ():
        dflash_rules().rename(name)
    mask = _field(info, "mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise InvalidOption(
            f"mask_token_id of the DFlash drafter is {mask!r}; it must be one of the model's {target.vocab_size} tokens"
        )
    windows, causal = _visible(info)
    attention = replace(llama_attention(info), qk_norm="heads")
    shape = llama_shape(info, attention, windows=windows)
    scale = float(_field(info, "input_embedding_scale") or 1.0)
    return DFlashShape(replace(shape, tied=False), len(dflash_taps(info, len(target.layers))), causal, int(mask), scale)


def dflash_taps(info: ModelInfo, num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the drafter reads. Its config lists the layers before them, by their
    outputs."""
    layers = _field(info, "target_layer_ids")
    listed = layers if isinstance(layers, list) else []
    if not listed or not all(isinstance(layer, int) and 0 <= layer < num_layers - 1 for layer in listed):
        raise InvalidOption(
            f"target_layer_ids of the DFlash drafter is {layers!r}; it must list layers of the model before the last "
            f"of its {num_layers}"
        )
    return tuple(layer + 1 for layer in listed)


def check_block(info: ModelInfo, num_drafts: int) -> None:
    """Raises InvalidOption if a block has no room for so many drafts after the token drawn last."""
    size = int(_field(info, "block_size") or 16)
    if num_drafts >= size:
        raise InvalidOption(
            f"num_speculative_tokens is {num_drafts}, and the blocks of the DFlash drafter have {size} tokens, of "
            f"which the first is not a draft; give at most {size - 1}"
        )


def _field(info: ModelInfo, name: str) -> Any:
    """A field of dflash_config, or of config.json itself."""
    own = info.extra.get("dflash_config")
    found = own.get(name) if isinstance(own, dict) else None
    return info.extra.get(name) if found is None else found


def _refuse_variants(info: ModelInfo) -> None:
    for name in (
        "conv_kernel_size",
        "selector_rank",
        "fc_layernorm",
        "attention_sink_bias",
        "add_swa_attention_sink_bias",
        "draft_vocab_size",
        "markov_rank",
    ):
        value = _field(info, name)
        if value and not (name == "draft_vocab_size" and value == info.vocab_size):
            raise InvalidOption(
                f"the DFlash drafter has {name} in config.json, which is not supported; give another drafter"
            )
    if _field(info, "is_neox_style") is False:
        raise InvalidOption("the DFlash drafter rotates neighbouring pairs (is_neox_style), which is not supported")


def _visible(info: ModelInfo) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Per layer: its window, 0 for none; and whether it is causal. Layers with a window are, unless the config says."""
    kinds = info.extra.get("layer_types") or ["full_attention"] * info.num_layers
    if len(kinds) != info.num_layers:
        raise InvalidOption(f"the DFlash drafter has {info.num_layers} layers and {len(kinds)} layer_types")
    is_local = [kind == "sliding_attention" for kind in kinds]
    if _field(info, "use_swa") and not any(is_local):
        is_local = [True] * info.num_layers
    window = int(_field(info, "swa_window_size") or info.extra.get("sliding_window") or 0)
    if any(is_local) and not window:
        raise InvalidOption("the DFlash drafter has layers with a window, and no sliding_window in config.json")
    given = info.extra.get("is_causal")
    given = _field(info, "causal") if given is None else given
    causal = tuple(kind == "sliding_attention" if given is None else bool(given) for kind in kinds)
    if any(local and not own for local, own in zip(is_local, causal, strict=True)):
        raise InvalidOption(
            "the DFlash drafter has layers with a window in both directions, which is not supported; give another "
            "drafter"
        )
    return tuple(window if local else 0 for local in is_local), causal


def dflash_rules() -> Rules:
    names: dict[str, str | None] = {
        "fc.{kind}": "fc.{kind}",
        "hidden_norm.weight": "hidden_norm.weight",
        "norm.weight": "norm.weight",
        "layers.{n}.input_layernorm.weight": "layers.{n}.attention_norm.weight",
        "layers.{n}.post_attention_layernorm.weight": "layers.{n}.mlp_norm.weight",
        "layers.{n}.self_attn.q_proj.{kind}": "layers.{n}.attention.query.{kind}",
        "layers.{n}.self_attn.k_proj.{kind}": "layers.{n}.attention.kv.k.{kind}",
        "layers.{n}.self_attn.v_proj.{kind}": "layers.{n}.attention.kv.v.{kind}",
        "layers.{n}.self_attn.o_proj.{kind}": "layers.{n}.attention.output.{kind}",
        "layers.{n}.self_attn.{part}_norm.weight": "layers.{n}.attention.norm.{part}.weight",
        "layers.{n}.mlp.down_proj.{kind}": "layers.{n}.mlp.down.{kind}",
        "layers.{n}.mlp.{part}_proj.{kind}": "layers.{n}.mlp.gate_up.{part}.{kind}",
    }
    return Rules(names | {f"model.{stored}": target for stored, target in names.items()})


# BlockAttention: attention of a block drafter, whose context positions have keys and values but no queries.


_KNOWN = {"num_heads", "num_kv_heads", "head_dim", "scale", "name", "qkv_bias", "output_bias", "qk_norm", "rope"}
_KNOWN |= {"causal", "shard", "output_scale", "num_kv_heads_of_all", "window"}  # a window is that of its pages


class BlockAttention(Layer):
    """Keys and values have a projection of their own, so that the context is not multiplied with that of queries."""

    def __init__(self, name: str, shape: AttentionShape, norm: NormShape, site: int, layout: Layout) -> None:
        """`norm` gives eps and offset of the norms of queries and keys."""
        super().__init__()
        assert shape.qk_norm == "heads", "block drafters have norms of queries and keys per head"
        assert has_only(shape, _KNOWN), f"block drafters do not implement all of {shape}"
        self.shape = shape
        self.site = site
        size, dtype, format_of = layout.hidden_size, layout.dtype, layout.format_of
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.query = Linear(size, {"": queries}, shape.qkv_bias, format_of(f"{name}.query"), dtype)
        self.kv = Linear(size, {"k": keys, "v": keys}, shape.qkv_bias, format_of(f"{name}.kv"), dtype)
        if shape.shard is not None:
            parts = stored_parts_of_heads(shape, shape.shard)
            self.query.stored_parts = {"": parts["q"]}
            self.kv.stored_parts = {"k": parts["k"], "v": parts["v"]}
        self.output = new_output(queries, size, shape.output_bias, format_of(f"{name}.output"), dtype, shape.shard)
        num_heads = {"q": shape.num_heads, "k": shape.num_kv_heads}
        self.norm = PerHeadNorm(num_heads, shape.head_dim, norm.eps, dtype, norm.offset)

    def write(self, features: torch.Tensor, context: ForwardContext) -> None:
        """Stores keys and values of features [T, hidden] at the slots of the context."""
        shape = self.shape
        heads = self.kv(features, context).view(len(features), 2 * shape.num_kv_heads, shape.head_dim)
        key, value = heads.split(shape.num_kv_heads, 1)
        weight = self.norm.weight[shape.num_heads :]
        key = norm_rope(key, weight, self.norm.eps, context.rotary[shape.rope])
        write_cache(key, value, *self._cache(context))

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]. All tokens write keys and values before any reads them."""
        shape = self.shape
        heads = torch.cat([self.query(x, context), self.kv(x, context)], 1).view(len(x), -1, shape.head_dim)
        query_key = heads.narrow(1, 0, shape.num_heads + shape.num_kv_heads)
        value = heads.narrow(1, shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        rotary, norm = context.rotary[shape.rope], self.norm
        query, _ = rope_and_write_cache(query_key, value, norm.weight, norm.eps, rotary, *self._cache(context))
        # a token sees keys after its own, so attention reads all of them from the pages
        out = context.attention.forward(query, None, None, self.site, shape.scale, context)
        projected: torch.Tensor = self.output(out.flatten(1), context)
        return projected

    def _cache(self, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = context.caches[self.site]
        return keys, values, context.batch.slots[context.group_of_site[self.site]]
