"""Tiny checkpoints of `tiny_families.py` as GGUF files, converted as llama.cpp's script does. Tensor names are those of
the gguf library's own map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from tiny_gguf import pairs_from_halves

ARCHITECTURES = {
    "gemma": "gemma", "olmo3": "olmo2", "smollm3": "smollm3", "granite": "granite", "seed_oss": "seed_oss",
    "arcee": "arcee", "ernie4_5": "ernie4_5", "hunyuan_v1_dense": "hunyuan-dense", "exaone4": "exaone4", "glm4": "glm4",
    "cohere": "command-r", "cohere2": "cohere2", "nemotron": "nemotron", "stablelm": "stablelm",
    "starcoder2": "starcoder2", "phi": "phi2", "gpt2": "gpt2", "gpt_neox": "gptneox", "apertus": "apertus",
    "ministral3": "mistral3",
}  # fmt: skip
PAIRED = ("llama", "arcee", "smollm3", "granite", "mistral3")


def write_family_gguf(folder: Path) -> Path:
    """Float32 tensors."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config_of(config, "layers")
    )
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    add_facts(writer, arch, config)
    heads = {"attn_q": config_of(config, "heads"), "attn_k": config_of(config, "kv_heads")}
    weights = converted(arch, config, load_file(folder / "model.safetensors"))
    if arch == "apertus":  # numbers of its activation are fields
        numbers = {name: weights.pop(name) for name in list(weights) if ".act_fn." in name}
        for which, add in {"p": writer.add_xielu_alpha_p, "n": writer.add_xielu_alpha_n}.items():
            add([float(value) for name, value in sorted(numbers.items()) if name.endswith(f"alpha_{which}")])
    for name, tensor in weights.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        stem = theirs.split(".")[-2]
        if arch in PAIRED and stem in heads:
            tensor = pairs_from_halves(tensor, heads[stem])
        if arch in ("gemma", "nemotron") and theirs.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(theirs, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def config_of(config: dict[str, Any], fact: str) -> int:
    names = {
        "layers": ("num_hidden_layers", "n_layer", "num_layers"),
        "heads": ("num_attention_heads", "n_head", "num_heads"),
        "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads"),
        "hidden": ("hidden_size", "n_embd", "d_model"), "ffn": ("n_inner", "intermediate_size", "d_ff"),
        "positions": ("max_position_embeddings", "n_positions"),
    }  # fmt: skip
    return next(config[name] for name in names[fact] if config.get(name) is not None)


def add_facts(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    hidden, heads = config_of(config, "hidden"), config_of(config, "heads")
    head_dim = config.get("head_dim") or config.get("d_kv") or hidden // heads
    writer.add_block_count(config_of(config, "layers"))
    writer.add_context_length(config_of(config, "positions"))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config_of(config, "ffn"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(config_of(config, "kv_heads"))
    writer.add_key_length(head_dim)
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    theta = rope.get("rope_theta", 10_000.0)
    if rope.get("alpha"):  # HunYuan: the converter computes the base
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if arch == "mistral3":
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    eps = next(config[n] for n in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
               if n in config)  # fmt: skip
    writer.add_layer_norm_rms_eps(eps)
    writer.add_layer_norm_eps(eps)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if config.get("layer_types"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    scales = {
        "attention_multiplier": writer.add_attention_scale, "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale, "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale, "use_parallel_residual": writer.add_parallel_residual,
    }  # fmt: skip
    for name, add in scales.items():
        if name in config:
            add(config[name])


def converted(arch: str, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the layouts that the conversion script writes."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t()
        if arch == "gptneox" and "query_key_value" in name:
            by_head = tensor.unflatten(0, (config["num_attention_heads"], 3, -1))
            tensor = by_head.transpose(0, 1).flatten(0, 2)
        if ".norms." in name:  # StableLM: one tensor for all heads
            name, head = name.replace("norms.", "").rsplit(".", 2)[0] + ".weight", int(name.split(".")[-2])
            count = config["num_attention_heads" if "q_layernorm" in name else "num_key_value_heads"]
            found.setdefault(name, torch.empty(count, len(tensor), dtype=tensor.dtype))[head] = tensor
            continue
        found[name] = tensor
    return found
