"""ModelInfo: a checkpoint's config.json (or a GGUF's fields), read once into our own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import BadCheckpoint, UnsupportedModel


class RopeInfo(msgspec.Struct, frozen=True):
    """Rotary positions: the base, and how it is stretched for long contexts."""

    theta: float = 10_000.0
    kind: str = "default"  # default, linear, llama3, yarn, longrope ...
    factors: dict[str, Any] = {}  # the scaling's own numbers, by their config.json names


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a decoder that its family file turns into a shape."""

    architecture: str  # as in config.json: LlamaForCausalLM, Qwen3ForCausalLM ...
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    norm_eps: float
    activation: str  # silu, gelu_pytorch_tanh ...
    tied_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeInfo = RopeInfo()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None  # of the checkpoint, if it says
    extra: dict[str, Any] = {}  # the whole of config.json, for facts only one family has


def read_model_info(folder: Path) -> ModelInfo:
    """From a folder in Hugging Face layout."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder} has no config.json; give a folder in Hugging Face layout or a .gguf file"
        ) from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download the model again") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} does not hold an object; download the model again")
    return model_info_from_config(config)


# What a config.json leaves out of a family whose own defaults are not the usual ones.
_GEMMA3 = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen2ForCausalLM": {"sliding_window": 4096},
    "Qwen3ForCausalLM": {"sliding_window": 4096, "head_dim": 128},
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
}


def model_info_from_config(config: dict[str, Any]) -> ModelInfo:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise BadCheckpoint('config.json names no architecture; add "architectures", for example ["LlamaForCausalLM"]')
    architecture = architectures[0]
    config = _DEFAULTS.get(architecture, {}) | _text_part(config)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelInfo(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn_size=int(config["intermediate_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=config.get("hidden_activation") or config.get("hidden_act") or "silu",
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            rope=_rope(config),
            eos_token_ids=_ids(config.get("eos_token_id")),
            bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
            dtype=config.get("dtype") or config.get("torch_dtype"),
            extra=config,
        )
    except KeyError as missing:
        raise UnsupportedModel(
            f"{architecture}: config.json lacks {missing}, so it is not a decoder we know; "
            "run a checkpoint that continues text, of Llama's style for example"
        ) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise BadCheckpoint(f"config.json of {architecture} holds a value of the wrong kind: {error}") from None


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """A model of text and pictures keeps the facts of its text apart."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    return config | {key: value for key, value in text.items() if value is not None and key != "architectures"}


def _rope(config: dict[str, Any]) -> RopeInfo:
    """Old configs have rope_theta and rope_scaling, new ones rope_parameters with both."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # where kinds of layers have their own, this is the one of full attention
    return rope_info(config, scaling.get("full_attention", scaling))


def rope_info(config: dict[str, Any], scaling: dict[str, Any]) -> RopeInfo:
    """From a rope_parameters or rope_scaling object; the rest of the config fills in what older ones keep there."""
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factors = {k: v for k, v in scaling.items() if k not in ("rope_theta", "rope_type", "type")}
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(key) is not None:
            factors.setdefault(key, config[key])
    return RopeInfo(theta=float(theta), kind=kind, factors=factors)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
