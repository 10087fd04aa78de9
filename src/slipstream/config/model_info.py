"""ModelInfo: the fields of a checkpoint's config.json or GGUF file, under names of our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.architecture import find_architecture
from slipstream.config.family_defaults import DECODERS, ENCODERS
from slipstream.config.json_file import load_json
from slipstream.config.quantization import Quantization, read_quantization
from slipstream.config.rope_info import RopeInfo, read_ropes
from slipstream.errors import BadCheckpoint, UnsupportedModel

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that configs have for the number of routed experts."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields from which a model family builds its shape."""

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
    backend_waits: tuple[str, ...] = ()  # places at which that module waits for the device
    backend_folder: str = ""  # of a model that runs by the module of the transformers library; "": by ours
    quantization: Quantization | None = None  # of the checkpoint's weights
    extra: dict[str, Any] = {}  # all of config.json, for fields that only one family has

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return next((int(self.extra[name]) for name in EXPERT_COUNTS if self.extra.get(name)), 0)


_MODELOPT = "hf_quant_config.json"  # ModelOpt's settings, which older checkpoints have instead of those in config.json


def read_model_info(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelInfo:
    """From a folder in the Hugging Face layout. `overrides`: fields that replace those of config.json; an object
    such as text_config replaces only the fields that it has."""
    path = folder / "config.json"
    if not path.exists():
        raise BadCheckpoint(f"{folder} has no config.json; give a folder in Hugging Face layout or a .gguf file")
    config = _load_object(path)
    if not config.get("quantization_config") and (folder / _MODELOPT).is_file():
        config["quantization_config"] = {"quant_method": "modelopt"} | _load_object(folder / _MODELOPT)
    return model_info_from_config(_merged(config, overrides or {}))


def _load_object(path: Path) -> dict[str, Any]:
    try:
        found = load_json(path)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download the model again") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path} does not hold an object; download the model again")
    return found


def _merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name, value in changes.items():
        nested = name.endswith("_config") and isinstance(value, Mapping) and isinstance(found.get(name), dict)
        found[name] = _merged(found[name], value) if nested else value
    return found


_ALSO_CALLED = {
    "hidden_size": ("dim", "n_embd"),
    "num_hidden_layers": ("n_layers", "n_layer"),
    "num_attention_heads": ("n_heads", "n_head"),
    "intermediate_size": ("hidden_dim", "n_inner"),
    "max_position_embeddings": ("n_positions",),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon"),
    "partial_rotary_factor": ("rotary_pct",),
    "rope_theta": ("rotary_emb_base",),
    "hidden_act": ("activation", "activation_function"),
}
_T5_NAMES = _ALSO_CALLED | {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",),
    "head_dim": ("d_kv",),
    "intermediate_size": ("d_ff",),
}
_NEMOTRON_H_NAMES = _ALSO_CALLED | {
    "head_dim": ("attention_head_dim",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "use_conv_bias": ("mamba_conv_bias",),
    "time_step_min": ("mamba_dt_min",),
}
_LFM2_NAMES = _ALSO_CALLED | {"tie_word_embeddings": ("tie_embedding",)}
_OWN_NAMES = {
    "T5Encoder": _T5_NAMES, "MT5Encoder": _T5_NAMES, "NemotronH": _NEMOTRON_H_NAMES,
    "Lfm2": _LFM2_NAMES, "Lfm2Moe": _LFM2_NAMES,
}  # fmt: skip
_NORM_EPS = ("norm_eps", "layer_norm_eps", "rms_norm_eps")


def family_name(architecture: str) -> str:
    """The beginning of an architecture's name: "Bert" for BertModel and for BertForSequenceClassification."""
    return re.sub(r"(For[A-Z]\w*|(?<=\w)Model)$", "", architecture)


def model_info_from_config(config: dict[str, Any]) -> ModelInfo:
    architecture = find_architecture(config)
    family = family_name(architecture)
    config = _rename(_text_part(config), _OWN_NAMES.get(family, _ALSO_CALLED))
    quantization = read_quantization(config)
    is_encoder = family in ENCODERS
    usual = ENCODERS[family] if is_encoder else DECODERS.get(family, {})
    if any(name in config for name in EXPERT_COUNTS):  # the default may have another of these names
        usual = {name: value for name, value in usual.items() if name not in EXPERT_COUNTS}
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
            is_causal=not is_encoder and not _is_bidirectional(architecture, config),
            position_offset=offset,
            num_types=int(config["type_vocab_size"]) if usual.get("type_vocab_size") is not None else 0,
            quantization=quantization,
            extra=config,
        )
    except KeyError as missing:
        raise UnsupportedModel(
            f"{architecture}: config.json lacks {missing}, so it is not a supported model; "
            "run a checkpoint that continues text, of Llama's style for example, or an encoder of BERT's"
        ) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadCheckpoint(f"config.json of {architecture} has a wrong value: {error}") from None


def _is_bidirectional(architecture: str, config: dict[str, Any]) -> bool:
    """Decoders that were trained further as embedders: their config or their name says so."""
    # "vision": tokens of an image see each other, those of a text do not (Gemma 4)
    both = config.get("is_causal") is False or config.get("use_bidirectional_attention") not in (None, False, "vision")
    return both or "Bidirectional" in architecture


def _ffn_size(value: Any) -> int:
    """Gemma 3n lists a size per layer; this is the largest."""
    return max(map(int, value)) if isinstance(value, list) else int(value)


def _rename(config: dict[str, Any], also_called: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Some families have their own names for common fields."""
    found = {
        ours: config[theirs]
        for ours, names in also_called.items()
        for theirs in names
        if config.get(ours) is None and config.get(theirs) is not None
    }
    if "n_embd" in config and config.get("n_inner", config.get("intermediate_size")) is None:
        found["intermediate_size"] = 4 * int(config["n_embd"])  # GPT-2
    # Nemotron-H leaves out how many layers there are
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if "num_hidden_layers" not in config and isinstance(kinds, list | str):
        found["num_hidden_layers"] = len(kinds)
    return config | found


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """A multimodal model has the fields of its text model in an object of its own, a draft head those of its layer."""
    text = config.get("text_config", config.get("transformer_layer_config"))
    if not isinstance(text, dict):
        return config
    found = config | {key: value for key, value in text.items() if value is not None and key != "architectures"}
    # written in either place; `as_stored` corrects it if the weights have two different tensors
    if config.get("tie_word_embeddings") or text.get("tie_word_embeddings"):
        found["tie_word_embeddings"] = True
    return found


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, list) else (int(value),)
