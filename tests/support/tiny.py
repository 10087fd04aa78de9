"""Tiny checkpoints for tests: two layers, random weights, with a tokenizer. No downloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tiny_families import MORE
from tiny_saved import SAVED, save_model
from tiny_tokenizer import END_OF_TEXT, IM_END, write_byte_tokenizer

VOCAB_SIZE = 304  # larger than the tokenizer's vocabulary, as in real checkpoints
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
}
DELTA_NET = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": 16, "rms_norm_eps": 1e-5},
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 16, "rms_norm_eps": 1e-5, "sliding_window": 8},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "rms_norm_eps": 1e-6},
    # a window of two pages of four, soft caps low enough to matter, a scale that does not follow from the head size
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 24,
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 3,
        "head_dim": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "tie_word_embeddings": True,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "rms_norm_eps": 1e-5, "pad_token_id": END_OF_TEXT},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "rms_norm_eps": 1e-6, "pad_token_id": END_OF_TEXT},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "rms_norm_eps": 1e-5, "num_local_experts": 6, "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "rms_norm_eps": 1e-6, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "rms_norm_eps": 1e-6, "head_dim": 24, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"], "rms_norm_eps": 1e-5, "num_experts": 5, "num_experts_per_tok": 2,
        "pad_token_id": END_OF_TEXT,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "rms_norm_eps": 1e-5, "head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "attention_bias": True,
        "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "head_dim": 16, "rms_norm_eps": 1e-5, "num_local_experts": 6,
        "num_experts_per_tok": 3, "sliding_window": 8, "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1500.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 128,
        },
    },
    # two kinds of layers before and among those that share, windows of two pages, gates that are mostly cut
    "gemma3n": {
        "architectures": ["Gemma3nForCausalLM"], "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 5,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        "num_kv_shared_layers": 2, "intermediate_size": [96, 80, 96, 96, 64], "final_logit_softcapping": 5.0,
        "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0, 0.0], "altup_num_inputs": 3, "laurel_rank": 8,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 300, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
        "num_hidden_layers": 5, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 300,
        "tie_word_embeddings": True, "use_double_wide_mlp": True, "final_logit_softcapping": 5.0,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 3, "num_key_value_heads": 4,
        "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 1, "moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 128,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.9,
        },
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 3, "num_key_value_heads": 4,
        "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 1, "moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
    },
    # the last layer has a state; rope over 6 of 24 values of a head
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"], **DELTA_NET, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "norm_topk_prob": True,
    },
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], **DELTA_NET},
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"], **DELTA_NET, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
    },
}  # fmt: skip
_OF_TRANSFORMERS = ("gemma3n_text", "gemma4_text", "deepseek_v2", "deepseek_v3")
"""Model types whose tensors are those of the library's own model."""
_CONFIGS = {
    "gemma3": "Gemma3TextConfig", "gemma3n": "Gemma3nTextConfig", "gemma4": "Gemma4TextConfig",
    "qwen3_5": "Qwen3_5TextConfig", "qwen3_5_moe": "Qwen3_5MoeTextConfig", "falcon_h1": "FalconH1Config",
}  # fmt: skip


def write_tiny(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint of the family into the folder. Overrides are fields of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(folder)
    own = SAVED.get(family) or MORE.get(family)
    if own is not None:
        _write_config(folder, family, {**_COMMON, **own, **overrides}, dtype)
        save_model(folder, dtype, seed)
        return folder
    settings = {**_COMMON, **_FAMILIES[family], **overrides}
    _write_config(folder, family, settings, dtype)
    write_weights(folder, tiny_weights(folder, dtype, seed), shards)
    return folder


def tiny_weights(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors for the config of the folder, with a spread at which logits differ clearly."""
    config = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, spread: float = 0.15, middle: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread + middle).to(dtype)

    if config["model_type"] in _OF_TRANSFORMERS:
        return _library_weights(folder, random)
    hidden, ffn, vocab = config["hidden_size"], config.get("intermediate_size", 0), config["vocab_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    family = config["architectures"][0].removesuffix("ForCausalLM")
    gemma, olmo = family.startswith("Gemma"), family == "Olmo2"
    qkv_bias = attention_bias or (family.startswith("Qwen2") and config.get("qkv_bias", True))
    is_delta = family in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
    norm_middle = 0.0 if gemma or is_delta else 1.0  # of what is stored
    # the rounding of a delta rule grows with its state: smaller logits keep it under 1e-4 in float32
    logit_spread = 0.12 if is_delta else 0.3
    attention_bias = attention_bias and family != "Glm4Moe"

    weights = {"model.embed_tokens.weight": random(vocab, hidden, spread=logit_spread)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        products = {
            "self_attn.q_proj": ((2 if is_delta else 1) * queries, hidden, qkv_bias),
            "self_attn.k_proj": (keys, hidden, qkv_bias),
            "self_attn.v_proj": (keys, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, queries, attention_bias),
            "mlp.gate_proj": (ffn, hidden, mlp_bias),
            "mlp.up_proj": (ffn, hidden, mlp_bias),
            "mlp.down_proj": (hidden, ffn, mlp_bias),
        }
        if is_delta and config["layer_types"][layer] == "linear_attention":
            products = {name: product for name, product in products.items() if "self_attn" not in name}
            products |= {name: (*shape, False) for name, shape in _delta_net(config, family).items()}
            channels, heads = _delta_channels(config), config["linear_num_value_heads"]
            state = f"{prefix}.linear_attn"
            weights[f"{state}.conv1d.weight"] = random(channels, 1, config["linear_conv_kernel_dim"], spread=1.0)
            weights[f"{state}.A_log"] = random(heads, spread=0.5)
            weights[f"{state}.dt_bias"] = random(heads, spread=0.5)
            weights[f"{state}.norm.weight"] = random(config["linear_value_head_dim"], middle=1.0)
        if family == "Phi3":
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                del products[name]
            products["self_attn.qkv_proj"] = (queries + 2 * keys, hidden, False)
            products["mlp.gate_up_proj"] = (2 * ffn, hidden, False)
        if is_sparse(config, layer):
            for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
                del products[name]
            if family == "GptOss":
                weights |= {f"{prefix}.{name}": random(*shape) for name, shape in _stacked_experts(config).items()}
                # wide enough that gates and ups are clamped
                weights[f"{prefix}.mlp.experts.gate_up_proj_bias"] *= 40
            else:
                products |= {name: (*shape, False) for name, shape in _experts(config, family).items()}
            if family == "Glm4Moe":
                weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = random(config["n_routed_experts"])
        for name, (num_rows, num_columns, bias) in products.items():
            weights[f"{prefix}.{name}.weight"] = random(num_rows, num_columns)
            if bias:
                weights[f"{prefix}.{name}.bias"] = random(num_rows)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if gemma or olmo:
            norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if olmo:
            del norms["input_layernorm"], norms["pre_feedforward_layernorm"]
            norms |= {"self_attn.q_norm": queries, "self_attn.k_norm": keys}
        if family == "Olmoe":
            norms |= {"self_attn.q_norm": queries, "self_attn.k_norm": keys}
        if family in ("Qwen3", "Gemma3", "Qwen3Moe") or config.get("use_qk_norm"):
            norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
        if is_delta and "self_attn.q_proj" in products:
            norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
        for name, size in norms.items():
            weights[f"{prefix}.{name}.weight"] = random(size, middle=norm_middle)
    weights["model.norm.weight"] = random(hidden, middle=norm_middle)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random(vocab, hidden, spread=logit_spread)
    return weights


def _library_weights(folder: Path, random: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the library's model, in its own order: norms and scales around 1, the rest around 0."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        is_factor = "norm" in name or name.endswith(("scale", "scalar"))
        spread = 0.3 if "embed" in name or "lm_head" in name else 0.15
        weights[name] = random(*tensor.shape, spread=spread, middle=1.0 if is_factor else 0.0)
    return weights


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Whether the layer has experts."""
    if not any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return False
    dense = range(config.get("first_k_dense_replace", 0)), config.get("mlp_only_layers") or ()
    return not any(layer in layers for layers in dense) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _experts(config: dict[str, Any], family: str) -> dict[str, tuple[int, int]]:
    """Names and shapes of a layer's experts, as in Hub checkpoints."""
    hidden, size = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    count = next(config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(name))
    root, names = "mlp", {"gate_proj": "up", "up_proj": "up", "down_proj": "down"}
    if family == "Mixtral":
        root, names = "block_sparse_moe", {"w1": "up", "w3": "up", "w2": "down"}
    shapes = {"up": (size, hidden), "down": (hidden, size)}
    found = {f"{root}.gate": (count, hidden)}
    found |= {f"{root}.experts.{e}.{name}": shapes[kind] for e in range(count) for name, kind in names.items()}
    shared = dict.fromkeys(QWEN_SHARED, ("shared_expert", config.get("shared_expert_intermediate_size")))
    shared["Glm4Moe"] = ("shared_experts", size * config.get("n_shared_experts", 1))
    if family in shared:
        name, inner = shared[family]
        found |= {f"mlp.{name}.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        found[f"mlp.{name}.down_proj"] = (hidden, inner)
    if family in QWEN_SHARED:
        found["mlp.shared_expert_gate"] = (1, hidden)
    return found


def _stacked_experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer of gpt-oss: transposed, and gate and up interleaved."""
    count, hidden, size = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    return {
        "self_attn.sinks": (config["num_attention_heads"],),
        "mlp.router.weight": (count, hidden),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * size),
        "mlp.experts.gate_up_proj_bias": (count, 2 * size),
        "mlp.experts.down_proj": (count, size, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
    }


QWEN_SHARED = ("Qwen2Moe", "Qwen3Next", "Qwen3_5Moe")
"""Families with a shared expert behind a gate."""


def _delta_channels(config: dict[str, Any]) -> int:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return 2 * keys + config["linear_num_value_heads"] * config["linear_value_head_dim"]


def _delta_net(config: dict[str, Any], family: str) -> dict[str, tuple[int, int]]:
    """Names and shapes of a layer's projections."""
    hidden, heads, channels = config["hidden_size"], config["linear_num_value_heads"], _delta_channels(config)
    values = heads * config["linear_value_head_dim"]
    root = "linear_attn"
    if family == "Qwen3Next":
        parts = {"qkvz": channels + values, "ba": 2 * heads}
    else:
        parts = {"qkv": channels, "z": values, "b": heads, "a": heads}
    found = {f"{root}.in_proj_{part}": (size, hidden) for part, size in parts.items()}
    return found | {f"{root}.out_proj": (hidden, values)}


def write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file({name: weights[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_config(folder: Path, family: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Uses the config classes of transformers, so that the file has the form of real ones."""
    import transformers

    if family in MORE:
        config = transformers.CONFIG_MAPPING[family](**settings)
    else:
        name = _CONFIGS.get(family) or f"{family.title().replace('_', '')}Config"
        config = getattr(transformers, name)(**settings)
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
