"""Settings of tiny decoders beside those of `tiny.py`, by model type; transformers saves their checkpoints itself."""

from __future__ import annotations

from typing import Any

_WINDOWS = ["sliding_attention", "full_attention"]
_YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_HALF = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"architectures": ["GemmaForCausalLM"], "head_dim": 24, "tie_word_embeddings": True},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"], "sliding_window": 8, "layer_types": _WINDOWS,
        "rope_parameters": {
            "full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "ministral": {
        "architectures": ["MinistralForCausalLM"], "head_dim": 24, "sliding_window": 8, "layer_types": _WINDOWS,
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"], "head_dim": 16,
        "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.3},
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0], "pad_token_id": 0},
    "granite": {
        "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.6, "attention_multiplier": 0.3,
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "head_dim": 24},
    "arcee": {"architectures": ["ArceeForCausalLM"]},
    "apertus": {"architectures": ["ApertusForCausalLM"], "pad_token_id": 0},
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 24},
    "hunyuan_v1_dense": {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 10.0, "factor": 1.0},
    },
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 8, "layer_types": _WINDOWS},
    "glm": {"architectures": ["GlmForCausalLM"], "head_dim": 24, "pad_token_id": 0, "rope_parameters": _HALF},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "head_dim": 24, "pad_token_id": 0, "rope_parameters": _HALF},
    "cohere": {"architectures": ["CohereForCausalLM"], "logit_scale": 0.5, "tie_word_embeddings": True},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"], "logit_scale": 0.5, "tie_word_embeddings": True, "sliding_window": 8,
        "layer_types": _WINDOWS,
    },
    "nemotron": {"architectures": ["NemotronForCausalLM"], "head_dim": 24, "rope_parameters": _HALF},
    "stablelm": {"architectures": ["StableLmForCausalLM"], "use_qkv_bias": True, "rope_parameters": _HALF},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "sliding_window": 9},
    "phi": {"architectures": ["PhiForCausalLM"], "rope_parameters": _HALF},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "num_key_value_heads": 4, "rope_parameters": _HALF},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "num_key_value_heads": 4, "n_inner": 96, "tie_word_embeddings": True,
    },
}  # fmt: skip
