"""PEFT LoRA folders with random matrices, and checkpoints with the adapter merged into the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
_CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of GPT-2: W is [inputs, outputs]
LLAMA_MODULES = tuple(
    f"model.layers.{layer}.{module}"
    for layer in range(2)
    for module in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
        "mlp.up_proj", "mlp.down_proj",
    )
)  # fmt: skip


def write_adapter(
    folder: Path,
    base: Path,
    modules: Collection[str] = LLAMA_MODULES,
    *,
    rank: int = 4,
    seed: int = 0,
    spread: float = 0.2,
    embeddings: Collection[str] = (),
    **settings: Any,
) -> Path:
    """An adapter for these modules of the checkpoint `base`. `embeddings`: modules that are embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(base / "model.safetensors")
    if "lm_head.weight" not in weights:  # tied
        weights["lm_head.weight"] = next((w for n, w in weights.items() if n.endswith("embed_tokens.weight")), None)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).float() * spread

    tensors = {}
    for module in modules:
        shape = weights[f"{module}.weight"].shape
        num_outputs, num_inputs = reversed(shape) if _is_conv1d(base, module) else shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = random(rank, num_inputs)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = random(num_outputs, rank)
    for module in embeddings:
        num_tokens, size = weights[f"{module}.weight"].shape
        tensors[f"{PREFIX}{module}.lora_embedding_A"] = random(rank, num_tokens)
        tensors[f"{PREFIX}{module}.lora_embedding_B"] = random(size, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def merge(base: Path, adapter: Path, target: Path) -> Path:
    """A copy of the checkpoint in float64 with W + scale * B A in place of W, as PEFT merges."""
    shutil.copytree(base, target)
    weights = {name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()}
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {
        name.removeprefix(PREFIX): t.double() for name, t in load_file(adapter / "adapter_model.safetensors").items()
    }
    for name, a in tensors.items():
        rank = a.shape[0]
        root = rank**0.5 if settings.get("use_rslora") else rank
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            delta = tensors[f"{module}.lora_B.weight"] @ a
            delta = delta.T if _is_conv1d(base, module) else delta
        elif name.endswith(".lora_embedding_A"):
            module = name.removesuffix(".lora_embedding_A")
            delta = (tensors[f"{module}.lora_embedding_B"] @ a).T
        else:
            continue
        alpha = settings.get("alpha_pattern", {}).get(module.rpartition(".")[2], settings["lora_alpha"])
        weights[f"{module}.weight"] += alpha / root * delta
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _is_conv1d(base: Path, module: str) -> bool:
    return json.loads((base / "config.json").read_text())["model_type"] == "gpt2" and module.endswith(_CONV1D)
