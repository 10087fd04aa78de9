"""Tiny checkpoints of state space models and hybrids with them, which transformers saves itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_MAMBA = {"num_hidden_layers": 3, "layer_norm_epsilon": 1e-5, "state_size": 12, "conv_kernel": 4}
_MAMBA_HYBRID = {
    "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
SAVED: dict[str, dict[str, Any]] = {
    "mamba": {"architectures": ["MambaForCausalLM"], **_MAMBA, "conv_kernel": 3, "time_step_rank": 5},
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], **_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2,
        "time_step_limit": (0.3, 2.0),
    },
    "granite_moe_hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"], **_MAMBA_HYBRID, "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 5, "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
    },
    "bamba": {"architectures": ["BambaForCausalLM"], **_MAMBA_HYBRID, "attn_layer_indices": [1]},
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"], **_MAMBA_HYBRID, "mamba_d_ssm": 96, "mamba_d_head": 12,
        "lm_head_multiplier": 0.8, "embedding_multiplier": 2.5, "mlp_multipliers": [1.5, 0.7], "key_multiplier": 0.6,
        "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.25,
        "ssm_multipliers": [1.25, 0.75, 1.125, 0.625, 1.375],
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.85,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"], "head_dim": 16, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 8,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"], "ssm_state_size": 12, "conv_kernel": 4,
        "mamba_head_dim": 12, "n_groups": 2, "time_step_min": 0.4,
    },
    "jamba": {
        "architectures": ["JambaForCausalLM"], "num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 2,
        "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 12, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 5, "rms_norm_eps": 1e-5,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3, "block_multiple_of": 8, "norm_eps": 1e-5,
    },
    "lfm2_moe": {
        "architectures": ["Lfm2MoeForCausalLM"], "num_hidden_layers": 4, "num_dense_layers": 1, "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"], "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "routed_scaling_factor": 1.5, "norm_eps": 1e-5,
    },
}  # fmt: skip
"""Families whose checkpoints the library saves itself."""
NEMOTRON_3 = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
    "n_group": 3,
    "topk_group": 2,
}
"""Fields of Nemotron 3 for "nemotron_h"."""


def save_model(folder: Path, dtype: torch.dtype, seed: int, kind: str = "AutoModelForCausalLM") -> None:
    """Writes a random checkpoint for the config of the folder as the library does, with the tensor names of the hub.
    `kind`: the library's class for it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, kind).from_config(config).to(dtype)
    biases = [each for each in model.named_buffers() if each[0].endswith(("correction_bias", "expert_bias"))]
    for name, tensor in [*model.named_parameters(), *biases]:
        is_factor = "norm" in name or ".ln_" in name or name.endswith(".D")
        spread = 0.3 if "embed" in name or "lm_head" in name else 0.5 if tensor.dim() < 2 or "conv" in name else 0.15
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * spread
        tensor.data.copy_(values + (1.0 if is_factor else 0.0))
    model.save_pretrained(folder)
