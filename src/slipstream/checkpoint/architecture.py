"""The architecture that config.json names, or that its model_type implies.

Some published configs have a model_type and no architectures. A model_type names the backbone, not the head: an encoder
is then loaded as a plain backbone, a decoder as a causal LM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from slipstream.base.errors import BadCheckpoint, UnsupportedModel

OF_MODEL_TYPE = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "camembert": "CamembertModel",
    "distilbert": "DistilBertModel",
    "xlm-roberta-xl": "XLMRobertaXLModel",
    "electra": "ElectraModel",
    "albert": "AlbertModel",
    "deberta-v2": "DebertaV2Model",
    "eurobert": "EuroBertModel",
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "mpnet": "MPNetModel",
    "modernbert": "ModernBertModel",
    "nomic_bert": "NomicBertModel",
    "new": "NewModel",
    "gte": "GteModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
    "gemma": "GemmaForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "arcee": "ArceeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "olmo2": "Olmo2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "jamba": "JambaForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def continues_text(architecture: str) -> bool:
    """Whether the model has a projection to tokens behind a decoder."""
    return architecture.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))


_CLASSIFIER = "ForSequenceClassification"


def find_architecture(config: dict[str, Any]) -> str:
    """Raises BadCheckpoint if config.json names neither, UnsupportedModel for a model_type that is not supported."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        # a classifier that is made of rows of the LM head: the checkpoint is that of a causal LM
        by_tokens = bool(config.get("classifier_from_token")) and named[0].endswith(_CLASSIFIER)
        return named[0].removesuffix(_CLASSIFIER) + "ForCausalLM" if by_tokens else named[0]
    if named:
        raise BadCheckpoint(
            f'config.json: architectures is {named!r}, not a list of names; for example ["LlamaForCausalLM"]'
        )
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise BadCheckpoint(
            'config.json names neither an architecture nor a model_type; add "architectures", for example '
            '["LlamaForCausalLM"]'
        )
    if kind not in OF_MODEL_TYPE:
        raise UnsupportedModel(
            f"config.json names no architecture, and its model_type {kind} is not one that runs here; "
            f"{near_names(kind, OF_MODEL_TYPE)}"
        )
    return OF_MODEL_TYPE[kind]


def near_names(name: str, known: Iterable[str]) -> str:
    """Tells where to look instead of a name that is not known. A list of all names would hide the reason before it."""
    near = difflib.get_close_matches(name, known, cutoff=0.5)
    return (f"similar names are {', '.join(near)}; " if near else "") + "docs/models.md lists all"


# Defaults for fields that the config.json of a family may omit, where its config class differs from the usual ones.

_GEMMA3 = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA3N = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768, "sliding_window": 512, "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4,
    "num_kv_shared_layers": 15, "laurel_rank": 64, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA4 = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072, "sliding_window": 512, "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256, "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}  # fmt: skip
_MINISTRAL3 = {
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_QWEN2_VL = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 4096, "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
}  # fmt: skip
_GLM = {
    "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_COHERE = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
_GPT2 = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "tie_word_embeddings": True}
_DELTA_NET = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "num_key_value_heads": 4, "norm_topk_prob": True,
}  # fmt: skip
_DELTA_NET_MOE = _DELTA_NET | {
    "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 512,  # every layer of Qwen3.5-MoE has experts: no MLP has the size that its config leaves out
}  # fmt: skip
# without attention a model has no longest context; this one is run unless max_model_len says less
_MAMBA = {
    "num_attention_heads": 1, "intermediate_size": 0, "max_position_embeddings": 32_768, "state_size": 16,
    "conv_kernel": 4, "layer_norm_eps": 1e-5,
}  # fmt: skip
_MAMBA_HYBRID = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
}  # fmt: skip
_LFM2 = {"conv_L_cache": 3, "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "tie_word_embeddings": True}
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "Mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Ministral3": _MINISTRAL3,
    "Mistral3": {"num_key_value_heads": 8, "tie_word_embeddings": True},
    "Llava": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "Qwen2VL": _QWEN2_VL,
    "Qwen2_5_VL": _QWEN2_VL,
    "Qwen3VL": {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0},
    "Qwen3VLMoe": {
        "num_key_value_heads": 16, "rope_theta": 500_000.0, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    },
    "Gemma": {
        "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "Gemma2": _GEMMA2,
    "Gemma3": _GEMMA3,
    "Gemma3Text": _GEMMA3,
    "Gemma3n": _GEMMA3N,
    "Gemma3nText": _GEMMA3N,
    "Gemma4": _GEMMA4,
    "Gemma4Text": _GEMMA4,
    "Phi3": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "Olmo2": {"rms_norm_eps": 1e-5},
    "Olmo3": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "SmolLM3": {
        "num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "no_rope_layer_interval": 4,
    },
    "SeedOss": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    "Arcee": {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    "Apertus": {
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 12_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "Ernie4_5": {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "HunYuanDenseV1": {"rms_norm_eps": 1e-5},
    "Glm": _GLM,
    "Glm4": _GLM,
    "Cohere": _COHERE | {"rope_theta": 500_000.0},
    "Cohere2": _COHERE | {"sliding_window": 4096},
    "Nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "StableLm": {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    "Starcoder2": {
        "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "Phi": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "GPTNeoX": {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True},
    "GPT2": _GPT2,
    "GPT2LMHead": _GPT2,
    "Exaone4": {
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    "Mixtral": {
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    "Qwen2Moe": {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "sliding_window": 4096,
    },
    "Qwen3Moe": {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    "Olmoe": {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
    "Glm4Moe": {
        "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
    # its config class has no default of num_experts_per_tok
    "DeepseekV2": _LATENT | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    "DeepseekV3": _LATENT | {
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
    },
    "GptOss": {
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "Mamba": _MAMBA | {"tie_word_embeddings": True},
    "Mamba2": _MAMBA | {"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128},
    "GraniteMoeHybrid": _MAMBA_HYBRID | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
    },
    "Bamba": _MAMBA_HYBRID | {"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    "FalconH1": _MAMBA_HYBRID | {"num_key_value_heads": 8, "mamba_d_ssm": 1024, "rms_norm_eps": 1e-5},
    "Jamba": {
        "num_key_value_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "num_experts_per_tok": 2, "num_experts": 16,
    },
    "NemotronH": {
        "layer_norm_eps": 1e-5, "intermediate_size": 21_504, "max_position_embeddings": 4096, "conv_kernel": 4,
        "n_groups": 8, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "num_key_value_heads": 8,
        "head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    "Lfm2": _LFM2 | {"num_key_value_heads": 8},
    "Lfm2Vl": _LFM2 | {"num_key_value_heads": 8},
    "Lfm2Moe": {
        **_LFM2, "vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
        "num_experts": 32, "num_experts_per_tok": 4, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    },
    "Qwen3Next": _DELTA_NET_MOE | {"num_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5632},
    "Qwen3_5": _DELTA_NET,
    "Qwen3_5Text": _DELTA_NET,
    "Qwen3_5Moe": _DELTA_NET_MOE,
    "Qwen3_5MoeText": _DELTA_NET_MOE,
}  # fmt: skip
# type_vocab_size None: the family has no table of token types, whatever its configs say
_BERT = {
    "layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
# positions are counted from the pad token id + 1
_ROBERTA = _BERT | {"layer_norm_eps": 1e-5, "max_position_embeddings": 514, "pad_token_id": 1, "offset_positions": True}
# its relative positions have no longest text; this one is run unless max_model_len says less
_T5 = {"max_position_embeddings": 512, "layer_norm_eps": 1e-6, "feed_forward_proj": "relu", "tie_word_embeddings": True}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": _BERT,
    "HF_ColBERT": _BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "XLMRobertaXL": _ROBERTA | {"type_vocab_size": 1},
    "Electra": _BERT | {"embedding_size": 128},
    "Albert": _BERT | {"hidden_act": "gelu_new", "embedding_size": 128},
    "DebertaV2": _BERT | {"layer_norm_eps": 1e-7, "type_vocab_size": 0, "pooler_hidden_act": "gelu"},
    "JinaBert": _BERT | {"max_position_embeddings": 8192, "position_embedding_type": "alibi"},
    "T5Encoder": _T5,
    "MT5Encoder": _T5 | {"feed_forward_proj": "gated-gelu"},
    # no length is too long for a mean; this one is run unless max_model_len says less
    "StaticEmbedding": {
        "num_hidden_layers": 0, "num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 32_768,
        "type_vocab_size": None,
    },
    "EuroBert": {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    "DistilBert": _BERT | {"type_vocab_size": None},
    "MPNet": _ROBERTA | {"layer_norm_eps": 1e-12, "type_vocab_size": None},
    "ModernBert": {
        "hidden_activation": "gelu", "tie_word_embeddings": True, "norm_eps": 1e-5, "local_attention": 128,
        "global_attn_every_n_layers": 3, "max_position_embeddings": 8192,
    },
    "NomicBert": _BERT | {"hidden_act": "silu", "rope_theta": 1000.0},
    "New": _BERT | {"type_vocab_size": 1},
    "Gte": _BERT | {"type_vocab_size": 1},
}  # fmt: skip
"""Bidirectional families, by how their architectures' names begin, and what their configs leave out."""
