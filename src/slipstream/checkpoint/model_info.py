"""ModelInfo: the fields of a checkpoint's config.json or GGUF file, under names of our own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.base.files import load_json
from slipstream.checkpoint.architecture import DECODERS, ENCODERS, find_architecture
from slipstream.checkpoint.locate import WHOLE, stored_shapes, weight_paths
from slipstream.checkpoint.quantization import Quantization, read_quantization
from slipstream.checkpoint.sentence_modules import STATIC, static_folder

# RopeInfo: rotary position embeddings as in config.json, by the rules of transformers 5.
#
# Older configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with both. If a file has both,
# `rope_scaling` is used. Gemma 3, 3n and 4, OLMo-3 and ModernBERT have an object per kind of layer, which
# `rope_scaling` changes.

_DEFAULT_THETA = 10_000.0
# families with a rope per kind of layer: the fields of the bases in older configs, and their defaults
_BY_LAYER = {
    "Gemma3": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma3Text": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma3n": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma3nText": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma4": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma4Text": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Olmo3": (("rope_theta", 500_000.0), ("rope_theta", 500_000.0)),
    "ModernBert": (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0)),
}
# models that see pictures, whose positions have three parts: in a text all three are the same
_THREE_PARTS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
_SCALED = ("llama3", "yarn", "longrope")  # kinds that depend on the original training length


class RopeInfo(msgspec.Struct, frozen=True):
    """Rotary position embeddings: the base, and the scaling for long contexts."""

    theta: float = _DEFAULT_THETA
    kind: str = "default"  # default, linear, dynamic, llama3, yarn, longrope ...
    factors: dict[str, Any] = {}  # parameters of the scaling, under their config.json names

    def short_length(self, max_model_len: int) -> int | None:
        """The longest request that uses LongRoPE's short factors, if longer ones use others; None: all requests of an
        engine have the same frequencies."""
        original = self.factors.get("original_max_position_embeddings")
        return original if self.kind == "longrope" and original is not None and original < max_model_len else None


def read_ropes(config: Mapping[str, Any], family: str) -> tuple[RopeInfo, RopeInfo | None]:
    """The rope of full attention, and that of layers with a window, if the family has one of its own for them."""
    scaling = config.get("rope_scaling")
    parameters = config.get("rope_parameters")
    if family in _BY_LAYER:
        return _by_layer(config, family, scaling, parameters or {})
    given = dict(scaling or parameters or {})
    given = dict(given.get("full_attention", given))
    rope = _rope(given, config.get("rope_theta"))
    if family == "Phi3" and rope.kind in ("su", "yarn"):  # names in early releases
        rope = msgspec.structs.replace(rope, kind="longrope")
    if family in _THREE_PARTS and rope.kind == "mrope":
        rope = msgspec.structs.replace(rope, kind="default")
    factors = dict(rope.factors)
    if (share := config.get("partial_rotary_factor")) is not None:
        factors.setdefault("partial_rotary_factor", share)
    if rope.kind in _SCALED and (original := config.get("original_max_position_embeddings")) is not None:
        factors["original_max_position_embeddings"] = original  # overrides the one among the parameters
    return msgspec.structs.replace(rope, factors=factors), None


def _by_layer(
    config: Mapping[str, Any], family: str, scaling: Any, parameters: Mapping[str, Any]
) -> tuple[RopeInfo, RopeInfo]:
    if not set(parameters) <= {"full_attention", "sliding_attention"}:
        raise BadCheckpoint(
            f"config.json: rope_parameters has {sorted(parameters)}; {family} has one each for full_attention and "
            "sliding_attention"
        )
    (full_name, full_theta), (local_name, local_theta) = _BY_LAYER[family]
    full = dict(parameters.get("full_attention") or {"rope_type": "default"})
    local = dict(parameters.get("sliding_attention") or {"rope_type": "default"})
    if scaling is not None:
        full |= scaling
        if family == "ModernBert":
            local |= scaling
    return _rope(full, config.get(full_name), full_theta), _rope(local, config.get(local_name), local_theta)


def _rope(given: dict[str, Any], theta: Any, usual: float = _DEFAULT_THETA) -> RopeInfo:
    """From a rope_parameters or rope_scaling object. `theta`: the base beside it in the config."""
    factors = {name: value for name, value in given.items() if name not in ("rope_theta", "rope_type", "type")}
    kind = given.get("rope_type") or given.get("type") or "default"
    return RopeInfo(float(given.get("rope_theta") or theta or usual), str(kind), factors)


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


STATIC_TENSORS = ("embedding.weight", "embeddings")
"""Names of the matrix of a StaticEmbedding: those of sentence-transformers and of model2vec."""
_MODELOPT = "hf_quant_config.json"  # ModelOpt's settings, which older checkpoints have instead of those in config.json


def read_model_info(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelInfo:
    """From a folder in the Hugging Face layout. `overrides`: fields that replace those of config.json; an object
    such as text_config replaces only the fields that it has."""
    if (static := static_folder(folder)) is not None:
        return model_info_from_config(_merged(_static_config(static), overrides or {}))
    path = folder / "config.json"
    if not path.exists():
        raise BadCheckpoint(f"{folder} has no config.json; give a folder in Hugging Face layout or a .gguf file")
    config = _load_object(path)
    if not config.get("quantization_config") and (folder / _MODELOPT).is_file():
        config["quantization_config"] = {"quant_method": "modelopt"} | _load_object(folder / _MODELOPT)
    return model_info_from_config(_merged(config, overrides or {}))


def _static_config(folder: Path) -> dict[str, Any]:
    """The fields of a StaticEmbedding, whose sizes are those of its one tensor."""
    kind, files = weight_paths(folder)
    shapes = stored_shapes(files[0]) if kind == "safetensors" else {}
    shape = next((shapes[name] for name in STATIC_TENSORS if name in shapes), None)
    if shape is None or len(shape) != 2 or len(shapes) > 1:
        raise UnsupportedModel(
            f"{folder} has a StaticEmbedding with the tensors {', '.join(shapes) or 'of torch.save'}; one matrix "
            f"{' or '.join(STATIC_TENSORS)} in {WHOLE} runs here: save it again with sentence-transformers"
        )
    return {"architectures": [f"{STATIC}Model"], "vocab_size": shape[0], "hidden_size": shape[1]}


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
    "Lfm2": _LFM2_NAMES, "Lfm2Vl": _LFM2_NAMES, "Lfm2Moe": _LFM2_NAMES,
}  # fmt: skip
_NORM_EPS = ("norm_eps", "layer_norm_eps", "rms_norm_eps")


def family_name(architecture: str) -> str:
    """The beginning of an architecture's name: "Bert" for BertModel and for BertForSequenceClassification."""
    return re.sub(r"(For[A-Z]\w*|(?<=\w)Model)$", "", architecture)


def model_info_from_config(config: dict[str, Any]) -> ModelInfo:
    architecture = find_architecture(config)
    family = family_name(architecture)
    try:
        config = _rename(_text_part(config), _OWN_NAMES.get(family, _ALSO_CALLED))
        quantization = read_quantization(config)
        is_encoder = family in ENCODERS
        usual = ENCODERS[family] if is_encoder else DECODERS.get(family, {})
        if any(name in config for name in EXPERT_COUNTS):  # the default may have another of these names
            usual = {name: value for name, value in usual.items() if name not in EXPERT_COUNTS}
        config = {"rms_norm_eps": 1e-6} | usual | config
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
            dtype=_name(config, "dtype") or _name(config, "torch_dtype"),
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


def _name(config: dict[str, Any], field: str) -> str | None:
    value = config.get(field)
    if not isinstance(value, str | None):
        raise TypeError(f"{field} is {value!r:.100}, not a name")
    return value or None


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


# ModelSizes: how much a step's activations take, as the model's shape reports it.
#
# The shape is known on the device half only (`nn/shapes.py`); the host half plans memory from these counts.


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of elements, not bytes."""

    widest: int = 0  # per token, inside the sublayer that takes the most; hidden states beside it not included
    per_step: int = 0  # however few tokens the step has, in float32 at least: copies of recurrent states
    rotary: int = 0  # per token: rows of the rope tables and their index
    split_sums: int = 0  # per row and split of its keys, over all cache groups: partial sums of attention
    keys: int = 0  # per position: keys of the site that has the most, and as many values
    scored_heads: int = 0  # heads with capped scores or sinks, whose scores torch computes in full; 0: none
    relative_heads: int = 0  # heads whose scores depend on a vector for each distance; 0: none
    relative_terms: int = 0  # of such scores: 1 of the query, 2 of query and key


# check_info: rejects a model with impossible sizes, before memory is allocated and before a step would fail.

# maxima far beyond any model: a wrong number must not make the start take hours
_MAX = {
    "vocab_size": 2**27, "hidden_size": 2**24, "num_layers": 2**12, "num_heads": 2**16, "num_kv_heads": 2**16,
    "head_dim": 2**16, "ffn_size": 2**27, "max_positions": 2**31 - 1,
}  # fmt: skip


def check_info(info: ModelInfo) -> ModelInfo:
    """Returns `info` without end tokens outside the vocabulary, which are never drawn. Raises for impossible sizes."""
    for name, limit in _MAX.items():
        count = getattr(info, name)
        is_without = name == "ffn_size" or (name == "num_layers" and info.architecture == f"{STATIC}Model")
        least = 0 if is_without else 1  # Mamba has no feed-forward, the mean of an embedding no layers
        if not least <= count <= limit:
            raise BadCheckpoint(f"{info.architecture} has a {name} of {count}; it must be {least} to {limit:,}")
    if info.num_types < 0 or info.position_offset < 0:
        raise BadCheckpoint(
            f"{info.architecture} has {info.num_types} token types and {info.position_offset} unused positions; they "
            "must be 0 or more"
        )
    if info.num_heads % info.num_kv_heads:
        raise BadCheckpoint(
            f"{info.architecture} has {info.num_heads} heads for {info.num_kv_heads} heads of keys and values; "
            "the first must be a multiple of the second"
        )
    if not (math.isfinite(info.norm_eps) and info.norm_eps >= 0):
        raise BadCheckpoint(f"{info.architecture} has a norm epsilon of {info.norm_eps}; it must be 0 or more")
    if not (math.isfinite(info.rope.theta) and info.rope.theta > 0):
        raise BadCheckpoint(f"{info.architecture} has a rope_theta of {info.rope.theta}; it must be over 0")
    ends = tuple(token for token in info.eos_token_ids if 0 <= token < info.vocab_size)
    return msgspec.structs.replace(info, eos_token_ids=ends)
