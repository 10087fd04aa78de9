"""ModelInfo: the facts of a checkpoint's config.json (or of a GGUF's fields), under names of our own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.architecture import find_architecture
from slipstream.config.rope_info import RopeInfo, read_ropes
from slipstream.errors import BadCheckpoint, UnsupportedModel

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that configs have for the number of routed experts."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts from which a model family builds its shape."""

    architecture: str  # as in config.json: LlamaForCausalLM, Qwen3ForCausalLM, BertModel ...
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int  # maximum length of a prompt
    norm_eps: float
    activation: str  # silu, gelu_pytorch_tanh ...
    tied_embeddings: bool
    has_lm_head: bool = True  # False: the checkpoint of a causal LM lacks the projection to tokens
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeInfo = RopeInfo()
    local_rope: RopeInfo | None = None  # of layers with a window, if they have one of their own
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None  # of the checkpoint, if it says
    is_causal: bool = True  # False: every token attends to the whole text, so the model cannot generate
    position_offset: int = 0  # rows of the position table before that of position 0 (RoBERTa)
    num_types: int = 0  # token types, which mark the two texts of a pair
    extra: dict[str, Any] = {}  # all of config.json, for facts that only one family has

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return next((int(self.extra[name]) for name in EXPERT_COUNTS if self.extra.get(name)), 0)


def read_model_info(folder: Path) -> ModelInfo:
    """From a folder in the Hugging Face layout."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder} has no config.json; give a folder in Hugging Face layout or a .gguf file"
        ) from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download the model again") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} does not hold an object; download the model again")
    return model_info_from_config(config)


# What a config.json may leave out in families whose defaults differ from the usual ones.
_GEMMA3 = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
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
_DELTA_NET = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}  # fmt: skip
# every layer of Qwen3.5-MoE has experts: no MLP has the size that its config leaves out
_DELTA_NET_MOE = _DELTA_NET | {"intermediate_size": 512}
# without attention a model has no longest context; this one is run unless max_model_len says less
_MAMBA = {
    "num_attention_heads": 1, "intermediate_size": 0, "max_position_embeddings": 32_768, "state_size": 16,
    "conv_kernel": 4, "layer_norm_eps": 1e-5,
}  # fmt: skip
_MAMBA_HYBRID = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "num_key_value_heads": 8,
}  # fmt: skip
_DECODERS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 4096},
    "Qwen2": {"sliding_window": 4096},
    "Qwen3": {"sliding_window": 4096, "head_dim": 128},
    "Gemma2": _GEMMA2,
    "Gemma3": _GEMMA3,
    "Gemma3Text": _GEMMA3,
    "Gemma3n": _GEMMA3N,
    "Gemma3nText": _GEMMA3N,
    "Gemma4": _GEMMA4,
    "Gemma4Text": _GEMMA4,
    "Phi3": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "Olmo2": {"rms_norm_eps": 1e-5},
    "DeepseekV3": {"n_group": 8, "topk_group": 4, "n_shared_experts": 1},
    "GptOss": {
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
    "Mamba2": _MAMBA | {"num_heads": 128, "head_dim": 64, "n_groups": 8},
    "GraniteMoeHybrid": _MAMBA_HYBRID,
    "Bamba": _MAMBA_HYBRID | {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    "FalconH1": _MAMBA_HYBRID | {"rms_norm_eps": 1e-5},
    "Jamba": {"mamba_d_state": 16, "mamba_d_conv": 4, "num_experts_per_tok": 2, "num_experts": 16},
    "NemotronH": {
        "layer_norm_eps": 1e-5,
        "intermediate_size": 21_504,
        "max_position_embeddings": 4096,
        "conv_kernel": 4,
        "n_groups": 8,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
    },
    "Lfm2": {"conv_L_cache": 3, "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
    "Qwen3Next": _DELTA_NET,
    "Qwen3_5": _DELTA_NET,
    "Qwen3_5Text": _DELTA_NET,
    "Qwen3_5Moe": _DELTA_NET_MOE,
    "Qwen3_5MoeText": _DELTA_NET_MOE,
}
_BERT = {
    "layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
# positions are counted from the pad token id + 1
_ROBERTA = _BERT | {"layer_norm_eps": 1e-5, "max_position_embeddings": 514, "pad_token_id": 1, "offset_positions": True}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": _BERT,
    "HF_ColBERT": _BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "DistilBert": _BERT | {"type_vocab_size": 0},
    "MPNet": _ROBERTA | {"layer_norm_eps": 1e-12, "type_vocab_size": 0},
    "ModernBert": {
        "hidden_activation": "gelu", "tie_word_embeddings": True, "norm_eps": 1e-5, "local_attention": 128,
        "global_attn_every_n_layers": 3, "max_position_embeddings": 8192,
    },
    "NomicBert": _BERT | {"hidden_act": "silu", "rope_theta": 1000.0},
    "New": _BERT | {"type_vocab_size": 1},
    "Gte": _BERT | {"type_vocab_size": 1},
}  # fmt: skip
"""Bidirectional families, by how their architectures' names begin, and what their configs leave out."""
_ALSO_CALLED = {
    "hidden_size": ("dim", "n_embd"),
    "num_hidden_layers": ("n_layers", "n_layer"),
    "num_attention_heads": ("n_heads", "n_head"),
    "intermediate_size": ("hidden_dim", "n_inner"),
    "max_position_embeddings": ("n_positions",),
    "layer_norm_eps": ("layer_norm_epsilon",),
    "hidden_act": ("activation", "activation_function"),
}
_NORM_EPS = ("norm_eps", "layer_norm_eps", "rms_norm_eps")


def family_name(architecture: str) -> str:
    """The beginning of an architecture's name: "Bert" for BertModel and for BertForSequenceClassification."""
    return re.sub(r"(For[A-Z]\w*|(?<=\w)Model)$", "", architecture)


def _refuse_quantised(config: dict[str, Any]) -> None:
    for name in ("quantization_config", "compression_config"):
        if (method := config.get(name)) is not None:
            kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
            instead = "a copy of it in bfloat16" if kind == "mxfp4" else "the plain checkpoint or a GGUF file"
            raise UnsupportedModel(f"the checkpoint is quantised by {kind}, which we do not run; give {instead}")


def model_info_from_config(config: dict[str, Any]) -> ModelInfo:
    architecture = find_architecture(config)
    family = family_name(architecture)
    config = _rename(_text_part(config))
    _refuse_quantised(config)
    is_encoder = family in ENCODERS
    usual = ENCODERS[family] if is_encoder else _DECODERS.get(family, {})
    config = {"rms_norm_eps": 1e-6} | usual | config
    try:
        rope, local_rope = read_ropes(config, family)
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        offset = int(config["pad_token_id"]) + 1 if config.get("offset_positions") else 0
        return ModelInfo(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn_size=_ffn_size(config["intermediate_size"]),
            max_positions=int(config["max_position_embeddings"]) - offset,
            norm_eps=float(next((config[name] for name in _NORM_EPS if config.get(name) is not None), 1e-6)),
            activation=str(config.get("hidden_activation") or config.get("hidden_act") or "silu"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            rope=rope,
            local_rope=local_rope,
            eos_token_ids=_ids(config.get("eos_token_id")),
            bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
            dtype=config.get("dtype") or config.get("torch_dtype"),
            is_causal=not is_encoder and not _sees_both_ways(architecture, config),
            position_offset=offset,
            num_types=int(config["type_vocab_size"]) if usual.get("type_vocab_size") else 0,
            extra=config,
        )
    except KeyError as missing:
        raise UnsupportedModel(
            f"{architecture}: config.json lacks {missing}, so it is not a model we know; "
            "run a checkpoint that continues text, of Llama's style for example, or an encoder of BERT's"
        ) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadCheckpoint(f"config.json of {architecture} holds a value of the wrong kind: {error}") from None


def _sees_both_ways(architecture: str, config: dict[str, Any]) -> bool:
    """Decoders that were trained further as embedders: their config or their name says so."""
    # "vision": tokens of an image see each other, those of a text do not (Gemma 4)
    both = config.get("is_causal") is False or config.get("use_bidirectional_attention") not in (None, False, "vision")
    return both or "Bidirectional" in architecture


def _ffn_size(value: Any) -> int:
    """Gemma 3n lists a size per layer; this is the largest."""
    return max(map(int, value)) if isinstance(value, list) else int(value)


def _rename(config: dict[str, Any]) -> dict[str, Any]:
    """Some families have their own names for common fields."""
    found = {
        ours: config[theirs]
        for ours, names in _ALSO_CALLED.items()
        for theirs in names
        if ours not in config and config.get(theirs) is not None
    }
    kinds = config.get("layers_block_type")  # Nemotron-H leaves out how many layers there are
    if "num_hidden_layers" not in config and isinstance(kinds, list):
        found["num_hidden_layers"] = len(kinds)
    return config | found


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """A multimodal model keeps the facts of its text model in an object of its own."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    return config | {key: value for key, value in text.items() if value is not None and key != "architectures"}


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, list) else (int(value),)
