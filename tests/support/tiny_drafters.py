"""Tiny drafters beside the checkpoints of `tiny.py`: MTP layers, EAGLE and EAGLE-3 heads, DFlash drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tiny import write_tiny, write_weights

FEW = (40, 77, 150, 201)
HEAD_DIM = 32  # of EAGLE-3 heads, which have 4 heads of queries and 1 of keys


def prefer_few_tokens(weights: dict[str, torch.Tensor]) -> None:
    """Large logits for a few tokens, so that drafts of random weights are sometimes right."""
    weights["lm_head.weight"][list(FEW)] *= 15


def write_few(folder: Path, **overrides: Any) -> Path:
    """A Llama of three layers that prefers a few tokens."""
    write_tiny(folder, "llama", num_hidden_layers=3, **overrides)
    weights = load_file(folder / "model.safetensors")
    prefer_few_tokens(weights)
    write_weights(folder, weights)
    return folder


def write_mtp(folder: Path, family: str = "deepseek_v3", **overrides: Any) -> Path:
    """A checkpoint of the family with an MTP layer, of random weights and otherwise like its last layer with
    attention."""
    count = "mtp_num_hidden_layers" if family.startswith("qwen") else "num_nextn_predict_layers"
    write_tiny(folder, family, **{count: 1}, **overrides)
    weights = load_file(folder / "model.safetensors")
    prefer_few_tokens(weights)
    config = json.loads((folder / "config.json").read_text())
    num, size = config["num_hidden_layers"], config["hidden_size"]
    generator = torch.Generator().manual_seed(7)
    if family.startswith("qwen"):
        source = max(layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention")
        middle, root, layer = 0.0, "mtp", "mtp.layers.0"
        norms, projection = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc"
    else:
        source, middle, root, layer = num - 1, 1.0, f"model.layers.{num}", f"model.layers.{num}"
        norms, projection = ("enorm", "hnorm", "shared_head.norm"), "eh_proj"
    added = {}
    for name, tensor in weights.items():
        if name.startswith(f"model.layers.{source}."):
            own = name.replace(f"model.layers.{source}", layer)
            added[own] = tensor + torch.randn(tensor.shape, generator=generator) * 0.1
    for name in norms:
        added[f"{root}.{name}.weight"] = middle + torch.randn(size, generator=generator) * 0.15
    added[f"{root}.{projection}.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.15
    if root != "mtp":
        added[f"{root}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        added[f"{root}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    write_weights(folder, weights | added)
    return folder


def write_eagle3(folder: Path, target: Path, draft_vocab: int | None = 60, **overrides: Any) -> Path:
    """An EAGLE-3 head in the layout of the hub, for a checkpoint with at least 3 layers. `draft_vocab`: tokens of its
    own vocabulary; None: it drafts all tokens with the target's projection."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    vocab, size, inner = config["vocab_size"], config["hidden_size"], overrides.get("intermediate_size", 80)
    own = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "vocab_size": vocab, "draft_vocab_size": draft_vocab or vocab, "hidden_size": size, "intermediate_size": inner,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(own | overrides))
    generator = torch.Generator().manual_seed(9)

    def random(*shape: int, spread: float = 0.15, middle: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread + middle

    weights = {
        "fc.weight": random(size, 3 * size),
        "norm.weight": random(size, middle=1.0),
        "midlayer.self_attn.q_proj.weight": random(4 * HEAD_DIM, 2 * size),
        "midlayer.self_attn.k_proj.weight": random(HEAD_DIM, 2 * size),
        "midlayer.self_attn.v_proj.weight": random(HEAD_DIM, 2 * size),
        "midlayer.self_attn.o_proj.weight": random(size, 4 * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(inner, size),
        "midlayer.mlp.up_proj.weight": random(inner, size),
        "midlayer.mlp.down_proj.weight": random(size, inner),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = random(size, middle=1.0)
    if draft_vocab is not None:
        others = (token for token in range(0, vocab, 3) if token not in FEW)
        tokens = torch.tensor(sorted([*FEW, *(next(others) for _ in range(draft_vocab - len(FEW)))]))
        head = random(draft_vocab, size, spread=0.3)
        head[torch.isin(tokens, torch.tensor(FEW))] *= 15
        weights["lm_head.weight"], weights["d2t"] = head, tokens - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, tokens, True)
    write_weights(folder, weights)
    return folder


def write_eagle(folder: Path, target: Path, *, bias: bool = True, **overrides: Any) -> Path:
    """An EAGLE head of version 1 in the layout of the hub: named as the model that it is for."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    size, inner = config["hidden_size"], overrides.get("intermediate_size", 80)
    own = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": size,
        "vocab_size": config["vocab_size"], "intermediate_size": inner, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(own | overrides))
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int, spread: float = 0.15, middle: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread + middle

    weights = {
        "embed_tokens.weight": load_file(target / "model.safetensors")["model.embed_tokens.weight"].clone(),
        "fc.weight": random(size, 2 * size),
        "layers.0.self_attn.q_proj.weight": random(4 * HEAD_DIM, size),
        "layers.0.self_attn.k_proj.weight": random(HEAD_DIM, size),
        "layers.0.self_attn.v_proj.weight": random(HEAD_DIM, size),
        "layers.0.self_attn.o_proj.weight": random(size, 4 * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": random(inner, size),
        "layers.0.mlp.up_proj.weight": random(inner, size),
        "layers.0.mlp.down_proj.weight": random(size, inner),
        "layers.0.post_attention_layernorm.weight": random(size, middle=1.0),
    }
    write_weights(folder, weights | ({"fc.bias": random(size)} if bias else {}))
    return folder


def write_dflash(folder: Path, target: Path, **overrides: Any) -> Path:
    """A DFlash drafter of two layers in the layout of the hub, for a checkpoint with at least 3 layers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    size, inner = config["hidden_size"], overrides.get("intermediate_size", 80)
    own = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": size,
        "vocab_size": config["vocab_size"], "intermediate_size": inner, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "block_size": 8, "dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 1]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(own | overrides))
    generator = torch.Generator().manual_seed(13)

    def random(*shape: int, spread: float = 0.15, middle: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread + middle

    weights = {"fc.weight": random(size, 2 * size), "hidden_norm.weight": random(size, middle=1.0)}
    weights["norm.weight"] = random(size, middle=1.0)
    for layer in range(2):
        root = f"layers.{layer}."
        for name, rows in (("q", 4 * HEAD_DIM), ("k", HEAD_DIM), ("v", HEAD_DIM)):
            weights[f"{root}self_attn.{name}_proj.weight"] = random(rows, size)
        weights[f"{root}self_attn.o_proj.weight"] = random(size, 4 * HEAD_DIM)
        for name in ("q_norm", "k_norm"):
            weights[f"{root}self_attn.{name}.weight"] = random(HEAD_DIM, middle=1.0)
        for name in ("gate", "up"):
            weights[f"{root}mlp.{name}_proj.weight"] = random(inner, size)
        weights[f"{root}mlp.down_proj.weight"] = random(size, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{root}{name}.weight"] = random(size, middle=1.0)
    write_weights(folder, weights)
    return folder
