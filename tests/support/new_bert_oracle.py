"""NewModel (Alibaba's name for the network of GTE 1.5) in plain torch, one text at a time. transformers lacks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tiny_encoder import write_pair_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["NewModel"], "model_type": "new", "vocab_size": 304, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 3, "max_position_embeddings": 128, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm", "position_embedding_type": "rope", "pack_qkv": True,
    "rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 2.0}, "type_vocab_size": 0, "num_labels": 3,
    "id2label": {"0": "a", "1": "b", "2": "c"}, "logn_attention_scale": False,
}  # fmt: skip


def write_new_bert(folder: Path, dtype: torch.dtype = torch.float32, root: str = "", **overrides: Any) -> Path:
    """`root`: prefix of all tensor names of the body, as in a model with a head."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | overrides
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, spread: float = 0.15, middle: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread + middle).to(dtype)

    size, ffn = config["hidden_size"], config["intermediate_size"]
    weights = {"embeddings.word_embeddings.weight": random(config["vocab_size"], size, spread=0.5)}
    if config["type_vocab_size"]:
        weights["embeddings.token_type_embeddings.weight"] = random(config["type_vocab_size"], size, spread=0.5)
    norms, products = ["embeddings.LayerNorm"], {"pooler.dense": (size, size, True)}
    for n in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        norms += [f"{layer}.attn_ln", f"{layer}.mlp_ln"]
        packed = {"qkv": 3 * size} if config["pack_qkv"] else dict.fromkeys("qkv", size)
        products |= {f"{layer}.attention.{part}_proj": (rows, size, True) for part, rows in packed.items()}
        products[f"{layer}.attention.o_proj"] = (size, size, True)
        products[f"{layer}.mlp.up_gate_proj"] = (2 * ffn, size, False)
        products[f"{layer}.mlp.down_proj"] = (size, ffn, True)
    for name in norms:
        weights |= {f"{name}.weight": random(size, middle=1.0), f"{name}.bias": random(size)}
    for name, (rows, columns, bias) in products.items():
        weights[f"{name}.weight"] = random(rows, columns)
        if bias:
            weights[f"{name}.bias"] = random(rows)
    weights = {root + name: tensor for name, tensor in weights.items()}
    if config["architectures"][0].endswith("Classification"):
        weights |= {"classifier.weight": random(3, size), "classifier.bias": random(3)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_pair_tokenizer(folder)
    return folder


def new_bert(folder: Path, ids: list[int], root: str = "", types: list[int] | None = None) -> torch.Tensor:
    """Hidden states [tokens, hidden] in the checkpoint's dtype."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name.removeprefix(root): x for name, x in load_file(folder / "model.safetensors").items()}
    size, heads, ffn = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    dim = size // heads

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (size,), weights[f"{name}.weight"], weights[f"{name}.bias"], config["layer_norm_eps"])

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def turn(x: torch.Tensor) -> torch.Tensor:  # [heads, tokens, dim]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x = weights["embeddings.word_embeddings.weight"][ids]
    if config["type_vocab_size"]:
        x = x + weights["embeddings.token_type_embeddings.weight"][types or [0] * len(ids)]
    factor = (config.get("rope_scaling") or {}).get("factor", 1.0)
    turns = 1.0 / (config["rope_theta"] * factor) ** (torch.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    angles = torch.outer(torch.arange(len(ids)).float(), turns).repeat(1, 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    x = norm("embeddings.LayerNorm", x)
    for n in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        if config["pack_qkv"]:
            parts = product(f"{layer}.attention.qkv_proj", x).split(size, -1)
        else:
            parts = tuple(product(f"{layer}.attention.{part}_proj", x) for part in "qkv")
        q, k, v = (part.unflatten(-1, (heads, dim)).transpose(0, 1) for part in parts)
        weigh = torch.softmax(turn(q) @ turn(k).transpose(1, 2) / dim**0.5, -1)
        x = norm(f"{layer}.attn_ln", x + product(f"{layer}.attention.o_proj", (weigh @ v).transpose(0, 1).flatten(1)))
        up, gate = product(f"{layer}.mlp.up_gate_proj", x).split(ffn, -1)
        x = norm(f"{layer}.mlp_ln", x + product(f"{layer}.mlp.down_proj", F.gelu(gate) * up))
    return x


def classify_new_bert(folder: Path, first: torch.Tensor) -> torch.Tensor:
    """Scores from the hidden state of the first token."""
    weights = load_file(folder / "model.safetensors")
    pooled = torch.tanh(F.linear(first, weights["new.pooler.dense.weight"], weights["new.pooler.dense.bias"]))
    return F.linear(pooled, weights["classifier.weight"], weights["classifier.bias"])
