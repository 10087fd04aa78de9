"""Tiny Llama-shaped models whose layers share cache sites, have heads of several sizes, or have sinks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.checkpoint.model_info import ModelInfo, read_model_info
from slipstream.nn import registry
from slipstream.nn.decoder import DecoderShape, RopeShape
from slipstream.nn.families.llama import llama_rules, llama_shape
from slipstream.nn.registry import Family
from slipstream.nn.shapes import AttentionShape
from slipstream.nn.weights.source import Rules
from tiny import write_tiny, write_weights


def shared(info: ModelInfo) -> DecoderShape:
    """Layers 2 and 3 read the keys and values of layer 1."""
    return change_mixers(info, lambda layer, mixer: replace(mixer, kv_source=1) if layer >= 2 else mixer)


def alternating(info: ModelInfo) -> DecoderShape:
    """Every second layer has larger heads, and fewer of them."""

    def change(layer: int, mixer: AttentionShape) -> AttentionShape:
        wide = replace(mixer, num_heads=2, num_kv_heads=1, head_dim=32, scale=32**-0.5, rope=1)
        return wide if layer % 2 else mixer

    ropes = (RopeShape(info.rope, 16), RopeShape(info.rope, 32))
    return replace(change_mixers(info, change), ropes=ropes)


def mixed(info: ModelInfo) -> DecoderShape:
    """Both: windows and caps in the narrow layers, and the last two read the site of the layer of their own kind."""

    def change(layer: int, mixer: AttentionShape) -> AttentionShape:
        changed = alternating(info).layers[layer].mixers[0]
        if layer % 2 == 0:
            changed = replace(changed, window=6, soft_cap=2.0)
        return replace(changed, kv_source=layer - 2 if layer >= 2 else None)

    return replace(change_mixers(info, change), ropes=alternating(info).ropes)


def with_sinks(info: ModelInfo) -> DecoderShape:
    """Sinks in all layers, a window in every second, and the last layer reads the site of layer 1."""

    def change(layer: int, mixer: AttentionShape) -> AttentionShape:
        source = 1 if layer == 3 else None
        return replace(mixer, sinks=True, window=0 if layer % 2 else 6, kv_source=source)

    return change_mixers(info, change)


def rules(shape: DecoderShape) -> Rules:
    return llama_rules(shape, {"model.layers.{n}.self_attn.sinks": "layers.{n}.attention.sinks"})


def change_mixers(info: ModelInfo, change: Callable[[int, AttentionShape], AttentionShape]) -> DecoderShape:
    shape = llama_shape(info)
    layers = (
        replace(layer, mixers=tuple(change(number, mixer) for mixer in layer.mixers))
        for number, layer in enumerate(shape.layers)
    )
    return replace(shape, layers=tuple(layers))


def write_sites(folder: Path, name: str, patch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a family that is known while the patch lasts, with tensors of Llama's names."""
    make_shape = MODELS[name]
    patch.setitem(registry.DECODERS, "Sites", Family(make_shape, rules))
    write_tiny(folder, "llama", num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["SitesForCausalLM"]}))
    write_weights(folder, weights(make_shape(read_model_info(folder))))
    return folder


MODELS = {"shared": shared, "alternating": alternating, "mixed": mixed, "sinks": with_sinks}


def weights(shape: DecoderShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*sizes: int, middle: float = 0.0) -> torch.Tensor:
        return torch.randn(sizes, generator=generator) * 0.15 + middle

    hidden = shape.hidden_size
    made = {
        "model.embed_tokens.weight": random_tensor(shape.vocab_size, hidden) * 2,
        "lm_head.weight": random_tensor(shape.vocab_size, hidden) * 2,
        "model.norm.weight": random_tensor(hidden, middle=1.0),
    }
    for number, layer in enumerate(shape.layers):
        (mixer,), feed, prefix = layer.mixers, layer.feed, f"model.layers.{number}"
        assert feed is not None
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        own = {} if mixer.kv_source is not None else {"k": keys, "v": keys}
        for part, size in ({"q": queries} | own).items():
            made[f"{prefix}.self_attn.{part}_proj.weight"] = random_tensor(size, hidden)
        if mixer.sinks:
            made[f"{prefix}.self_attn.sinks"] = random_tensor(mixer.num_heads) * 10
        made[f"{prefix}.self_attn.o_proj.weight"] = random_tensor(hidden, queries)
        for part in ("gate", "up"):
            made[f"{prefix}.mlp.{part}_proj.weight"] = random_tensor(feed.size, hidden)
        made[f"{prefix}.mlp.down_proj.weight"] = random_tensor(hidden, feed.size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{norm}.weight"] = random_tensor(hidden, middle=1.0)
    return made
