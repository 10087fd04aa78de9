"""JinaBERT v2 in plain torch, one text at a time: transformers lacks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tiny_encoder import write_pair_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["JinaBertModel"], "model_type": "bert", "vocab_size": 304, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 128,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    "type_vocab_size": 2,
}  # fmt: skip
SLOPES = (2**-4, 2**-8, 2**-2)  # of 3 heads: two for 2 heads, then the first of four heads
QK_NORM = {"AutoConfig": "jinaai/jina-bert-v2-qk-post-norm--configuration_bert.JinaBertConfig"}
NAMES = {
    False: ("mlp.gated_layers", "mlp.wo", "attention.output.LayerNorm", "mlp.layernorm"),
    True: ("mlp.up_gated_layer", "mlp.down_layer", "attention.output.LayerNorm", "layer_norm_2"),
}


def write_jina_bert(folder: Path, **overrides: Any) -> Path:
    config = CONFIG | overrides
    generator = torch.Generator().manual_seed(0)
    size, ffn, norms_queries = config["hidden_size"], config["intermediate_size"], "auto_map" in config

    def random(*shape: int, middle: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.15 + middle

    weights = {
        "embeddings.word_embeddings.weight": 3 * random(304, size),
        "embeddings.token_type_embeddings.weight": 3 * random(2, size),
    }
    norms, biased = ["embeddings.LayerNorm"], {}
    for n in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}."
        up, down, *own_norms = (layer + name for name in NAMES[norms_queries])
        norms += own_norms
        if norms_queries:
            norms += [f"{layer}attention.self.layer_norm_{part}" for part in "qk"] + [f"{layer}layer_norm_1"]
        weights[f"{up}.weight"] = random(2 * ffn, size)
        biased |= {f"{layer}attention.self.{name}": (size, size) for name in ("query", "key", "value")}
        biased |= {f"{layer}attention.output.dense": (size, size), down: (size, ffn)}
    weights |= {f"{name}.weight": random(size, middle=1.0) for name in norms}
    weights |= {f"{name}.weight": random(*shape) for name, shape in biased.items()}
    weights |= {f"{name}.bias": random(size) for name in [*norms, *biased]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_pair_tokenizer(folder)
    return folder


def jina_bert(folder: Path, ids: list[int]) -> torch.Tensor:
    """Hidden states [tokens, hidden]."""
    config = json.loads((folder / "config.json").read_text())
    weights, norms_queries = load_file(folder / "model.safetensors"), "auto_map" in config

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (48,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    places = torch.arange(len(ids))
    distances = (places[:, None] - places[None, :]).abs()
    penalty = torch.tensor(SLOPES, dtype=torch.float64)[:, None, None] * distances
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x)
    for n in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}."
        up, down, norm_1, norm_2 = (layer + name for name in NAMES[norms_queries])
        query, key, value = (product(f"{layer}attention.self.{name}", x) for name in ("query", "key", "value"))
        if norms_queries:
            query = norm(f"{layer}attention.self.layer_norm_q", query)
            key = norm(f"{layer}attention.self.layer_norm_k", key)
        query, key, value = (part.view(len(ids), 3, 16).transpose(0, 1) for part in (query, key, value))
        scores = (query @ key.transpose(1, 2) / 4 - penalty).softmax(-1)
        mixed = (scores @ value).transpose(0, 1).flatten(1)
        summed = norm(norm_1, product(f"{layer}attention.output.dense", mixed) + x)
        x = norm(f"{layer}layer_norm_1", x + summed) if norms_queries else summed
        first, second = product(up, x).chunk(2, -1)
        gate, other = (second, first) if norms_queries else (first, second)
        x = norm(norm_2, product(down, F.gelu(gate) * other) + x)
    return x
