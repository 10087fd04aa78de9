"""Tiny drafters beside the checkpoints of `tiny.py`: MTP layers, EAGLE-3 heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tiny import write_tiny, write_weights

FEW = (40, 77, 150, 201)


def prefer_few_tokens(weights: dict[str, torch.Tensor]) -> None:
    """Large logits for a few tokens, so that drafts of random weights are sometimes right."""
    weights["lm_head.weight"][list(FEW)] *= 15


def write_mtp(folder: Path, family: str = "deepseek_v3", **overrides: Any) -> Path:
    """A checkpoint of the family with an MTP layer, of random weights and otherwise like its last layer."""
    write_tiny(folder, family, num_nextn_predict_layers=1, **overrides)
    weights = load_file(folder / "model.safetensors")
    prefer_few_tokens(weights)
    config = json.loads((folder / "config.json").read_text())
    last, size = config["num_hidden_layers"] - 1, config["hidden_size"]
    generator = torch.Generator().manual_seed(7)
    added = {}
    for name, tensor in weights.items():
        if name.startswith(f"model.layers.{last}."):
            own = name.replace(f"layers.{last}.", f"layers.{last + 1}.")
            added[own] = tensor + torch.randn(tensor.shape, generator=generator) * 0.1
    root = f"model.layers.{last + 1}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{root}.{name}.weight"] = 1 + torch.randn(size, generator=generator) * 0.15
    added[f"{root}.eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.15
    added[f"{root}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{root}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    write_weights(folder, weights | added)
    return folder
