"""ModelInfo from the fields and tensors of a GGUF file, as `model_info.py` reads it from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.architecture import near_names
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.model_info import ModelInfo, RopeInfo

# the largest Gemma 2 and 3, known by their layers: attention is scaled by hidden_size / num_heads, not by head_dim
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}


# llama files may be Mistral, olmo2 files OLMo-3
_WITH_WINDOW = {"llama": "MistralForCausalLM", "olmo2": "Olmo3ForCausalLM"}


def gguf_model_info(file: GgufFile) -> ModelInfo:
    return _GgufFields(file).model_info()


class _GgufFields:
    """Typed reads of a file's fields. Each error names the field."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = file.path.name
        self.architecture = file.fields.get("general.architecture")
        if self.architecture not in FAMILIES:
            raise UnsupportedModel(
                f"{self.name} is of architecture {self.architecture!r}; {len(FAMILIES)} run in GGUF files, "
                f"and many more from folders with safetensors; {near_names(str(self.architecture), FAMILIES)}"
            )
        self.family: GgufFamily = FAMILIES[str(self.architecture)]

    def model_info(self) -> ModelInfo:
        self._refuse_what_we_do_not_run()
        heads = self.count("attention.head_count")
        hidden = self.count("embedding_length")
        head_dim = self.count("attention.key_length", hidden // heads)
        vocab_size = self._vocab_size(hidden)
        if self.family.encoder:
            return self._encoder_info(hidden, heads, head_dim, vocab_size)
        rotated = self.count("rope.dimension_count", head_dim)
        if rotated != head_dim and not self.family.partial_rope:
            raise UnsupportedModel(
                f"{self.name} rotates {rotated} of {head_dim} values of a head; we rotate all or none"
            )
        tensors = self.file.tensors
        extra = self._scalars() | self._family_fields(hidden, heads, head_dim)
        architecture = self.family.architecture
        if "sliding_window" in extra:  # families whose files have the name of another
            architecture = _WITH_WINDOW.get(str(self.architecture), architecture)
        rope = self._rope(head_dim, rotated)
        return ModelInfo(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_layers=self.count("block_count"),
            num_heads=heads,
            num_kv_heads=self.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_size=self.count("feed_forward_length"),
            max_positions=self.count("context_length"),
            norm_eps=self._norm_eps(1e-5),
            activation=self.family.activation,
            tied_embeddings="output.weight" not in tensors,
            is_causal=not self.family.bidirectional,
            attention_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            rope=rope,
            local_rope=self._local_rope(rope, architecture),
            eos_token_ids=self._end_tokens(),
            bos_token_id=self._token("bos_token_id"),
            extra=extra,
        )

    def _encoder_info(self, hidden: int, heads: int, head_dim: int, vocab_size: int) -> ModelInfo:
        """Tensor shapes give the numbers of positions and token types; rerankers are refused with their pooling."""
        positions = self._rows("position_embd.weight") if self.architecture == "bert" else self.count("context_length")
        return ModelInfo(
            architecture=self.family.architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_layers=self.count("block_count"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            ffn_size=self.count("feed_forward_length"),
            max_positions=min(positions, self.count("context_length", positions)),
            norm_eps=self._norm_eps(1e-12),
            activation=self.family.activation,
            tied_embeddings=True,
            is_causal=False,
            num_types=self._rows("token_types.weight") if "token_types.weight" in self.file.tensors else 0,
            extra=self._scalars() | self._family_fields(hidden, heads, head_dim),
        )

    def _norm_eps(self, of_layer_norms: float) -> float:
        """With the default of files of layer norms that do not say it."""
        if self.family.layer_norm:
            return self.real("attention.layer_norm_epsilon", of_layer_norms)
        return self.real("attention.layer_norm_rms_epsilon", 1e-6)

    def _rows(self, name: str) -> int:
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise BadCheckpoint(f"{self.name}: tensor {name} is missing or no table; convert the model again")
        return tensor.shape[0]

    def get(self, key: str) -> Any:
        return self.file.fields.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list) and value:  # one number per layer
            if len(set(map(str, value))) > 1:
                raise UnsupportedModel(
                    f"{self.name} has layers that differ in {self.architecture}.{key}; we run equal ones"
                )
            value = value[0]
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise BadCheckpoint(f"{self.name}: field {self.architecture}.{key} is {value!r}, it must be a count over 0")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise BadCheckpoint(
                f"{self.name}: field {self.architecture}.{key} is {value!r}, it must be a number over 0"
            )
        return float(value)

    def _refuse_what_we_do_not_run(self) -> None:
        if self.get("expert_count"):
            raise UnsupportedModel(
                f"{self.name} is a mixture of {self.get('expert_count')} experts; we run dense models"
            )
        if self.get("attention.causal") is False and not self.family.bidirectional:
            raise UnsupportedModel(
                f"{self.name} lets every token see the whole text, which runs here from a folder with safetensors"
            )
        if self.architecture not in WINDOWED and (window := self._window()):
            raise UnsupportedModel(
                f"{self.name} attends within a window of {window} tokens, which we do not know of {self.architecture}; "
                "run the same model from safetensors"
            )

    def _window(self) -> int | None:
        """None if the window is as large as the context."""
        window = self.get("attention.sliding_window")
        return window if isinstance(window, int) and 0 < window < self.count("context_length") else None

    def _family_fields(self, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
        """Fields that model families read from `ModelInfo.extra`, by their config.json names."""
        first = {name: f"blk.0.{tensor}" in self.file.tensors for name, tensor in self.family.tensors.items()}
        found = {name: self.get(key) for name, key in self.family.fields.items() if self.get(key) is not None}
        fields: dict[str, Any] = {**self.family.constants, **first, **found}
        if self.architecture == "t5encoder":  # the file does not name the activation
            gated = "enc.blk.0.ffn_gate.weight" in self.file.tensors
            fields["feed_forward_proj"] = "gated-gelu" if gated else "relu"
        if (window := self._window()) is not None:
            fields["sliding_window"] = window
        if self.architecture in BY_LAYER and self.get("attention.sliding_window") is not None:
            fields |= self._by_layer()
        if self.architecture not in _LARGEST_GEMMA:
            return fields
        fields.setdefault("sliding_window", self.count("context_length"))
        largest = self.count("block_count") == _LARGEST_GEMMA[self.architecture]
        fields["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
        if self.architecture == "gemma2":
            fields["attn_logit_softcapping"] = self.real("attn_logit_softcapping", 50.0)
            fields["final_logit_softcapping"] = self.real("final_logit_softcapping", 30.0)
            return fields
        return fields | self._by_layer()

    def _by_layer(self) -> dict[str, Any]:
        """Which layers have a window. A window as long as the context is kept: layers without one may have no rope."""
        fields: dict[str, Any] = {"sliding_window": self._window() or self.count("context_length")}
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):  # per layer: whether it has a window
            fields["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
        else:
            usual = BY_LAYER[str(self.architecture)]
            fields["sliding_window_pattern"] = self.count("attention.sliding_window_pattern", usual)
        return fields

    def _local_rope(self, rope: RopeInfo, architecture: str) -> RopeInfo | None:
        """The rope of layers with a window, in families in which it differs."""
        if self.architecture == "gemma3":
            return RopeInfo(self.real("rope.freq_base_swa", 10_000.0))
        return RopeInfo(rope.theta) if architecture == "Olmo3ForCausalLM" else None  # not scaled

    def _vocab_size(self, hidden: int) -> int:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise BadCheckpoint(
                f"{self.name} has no tensor token_embd.weight; it holds a vocabulary or a part of a model"
            )
        if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
            raise BadCheckpoint(
                f"{self.name}: token_embd.weight has shape {list(embedding.shape)}, it must be [vocabulary, {hidden}]"
            )
        return embedding.shape[0]

    def _end_tokens(self) -> tuple[int, ...]:
        """End of text, of turn and of message: a model may end an answer with any of them."""
        ids = (self._token(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def _token(self, name: str) -> int | None:
        value = self.file.fields.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _rope(self, head_dim: int, rotated: int) -> RopeInfo:
        theta = self.real("rope.freq_base", 1_000_000.0 if self.architecture == "gemma3" else 10_000.0)
        partial: dict[str, Any] = {} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}
        if "rope_factors_long.weight" in self.file.tensors:
            return RopeInfo(theta=theta, kind="longrope", factors=self._long_factors(rotated) | partial)
        if "rope_freqs.weight" in self.file.tensors:
            return RopeInfo(theta=theta, kind="llama3", factors=self._llama3_factors(theta, head_dim))
        kind = self.get("rope.scaling.type") or ("linear" if self.get("rope.scale_linear") else "none")
        if kind == "none":
            return RopeInfo(theta=theta, factors=partial)
        factor = self.real("rope.scaling.factor", self.real("rope.scale_linear", 1.0))
        if kind == "linear":
            return RopeInfo(theta=theta, kind="linear", factors={"factor": factor})
        if kind == "yarn":
            return RopeInfo(theta=theta, kind="yarn", factors=self._yarn_factors(factor))
        raise UnsupportedModel(f"{self.name} scales its positions by {kind!r}; we know none, linear, yarn and llama3")

    def _long_factors(self, rotated: int) -> dict[str, Any]:
        factors: dict[str, Any] = {
            "original_max_position_embeddings": self.count("rope.scaling.original_context_length"),
        }
        if self.get("rope.scaling.attn_factor") is not None:
            factors["attention_factor"] = self.real("rope.scaling.attn_factor", 1.0)
        for which in ("long", "short"):
            name = f"rope_factors_{which}.weight"
            tensor = self.file.tensors.get(name)
            if tensor is None or tensor.kind != "F32" or tensor.shape != (rotated // 2,):
                raise BadCheckpoint(f"{self.name}: tensor {name} is missing or not F32 [{rotated // 2}]")
            factors[f"{which}_factor"] = tensor.raw.view("<f4").tolist()
        return factors

    def _yarn_factors(self, factor: float) -> dict[str, Any]:
        factors: dict[str, Any] = {"factor": factor}
        if self.get("rope.scaling.original_context_length") is not None:
            factors["original_max_position_embeddings"] = self.count("rope.scaling.original_context_length")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if self.get(f"rope.scaling.{theirs}") is not None:
                factors[ours] = self.real(f"rope.scaling.{theirs}", 1.0)
        if self.architecture == "mistral3":
            if self.get("rope.scaling.yarn_log_multiplier"):  # its two strengths are one number, and cancel
                factors |= dict.fromkeys(
                    ("mscale", "mscale_all_dim"), self.real("rope.scaling.yarn_log_multiplier", 1.0)
                )
            if self.get("attention.temperature_scale") is not None:
                factors["llama_4_scaling_beta"] = self.real("attention.temperature_scale", 1.0)
        return factors

    def _llama3_factors(self, theta: float, head_dim: int) -> dict[str, Any]:
        """A GGUF file stores llama3 scaling as the divisor of each frequency. The largest divisor is the factor; the
        other three numbers are the same in every Llama 3 release, and are used only if they reproduce the tensor."""
        tensor = self.file.tensors["rope_freqs.weight"]
        if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
            found = f"{tensor.kind} {list(tensor.shape)}"
            raise BadCheckpoint(f"{self.name}: rope_freqs.weight is {found}, it must be F32 [{head_dim // 2}]")
        divisors = tensor.raw.view("<f4").astype(np.float64)
        factors = {
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if not np.allclose(divisors, llama3_divisors(theta, head_dim, **factors), rtol=1e-3):
            raise UnsupportedModel(
                f"{self.name} scales its positions by a rope_freqs.weight that is not Llama 3's; "
                "run the same model from safetensors"
            )
        return factors

    def _scalars(self) -> dict[str, Any]:
        """Facts that only one family uses. Lists, such as the vocabulary, stay in the file."""
        prefix = f"{self.architecture}."
        wanted = {key: self.file.fields[key] for key in self.file.fields if key.startswith(("general.", prefix))}
        return {key: value for key, value in wanted.items() if not isinstance(value, list)}


def llama3_divisors(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The divisor of each frequency under llama3 scaling: 1 for short waves, `factor` for long ones, a blend
    between."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original training length
    blend = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)


# Properties of each architecture that GGUF files name, for `checkpoint/gguf_info.py`.

GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    architecture: str  # as in config.json
    activation: str = "silu"
    layer_norm: bool = False  # eps is that of layer norms
    partial_rope: bool = False  # a part of a head may rotate
    bidirectional: bool = False  # every token sees the whole text
    encoder: bool = False  # with layers of BERT's kind, not those of a decoder
    # config.json name -> the file's field without the architecture
    fields: Mapping[str, str] = field(default_factory=dict)
    # config.json name -> the tensor of the first layer whose presence it states
    tensors: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)  # the same in all files


_COHERE: dict[str, str] = {"logit_scale": "logit_scale"}
FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(architecture="LlamaForCausalLM"),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM"),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM"),
    # of models that see pictures: the text part, whose rope is the usual one in texts
    "qwen2vl": GgufFamily(architecture="Qwen2ForCausalLM"),
    "qwen3vl": GgufFamily(architecture="Qwen3ForCausalLM"),
    "gemma": GgufFamily(architecture="GemmaForCausalLM", activation=GELU_TANH),
    "gemma2": GgufFamily(architecture="Gemma2ForCausalLM", activation=GELU_TANH),
    "gemma3": GgufFamily(architecture="Gemma3ForCausalLM", activation=GELU_TANH),
    "phi3": GgufFamily(architecture="Phi3ForCausalLM", partial_rope=True),
    "olmo2": GgufFamily(architecture="Olmo2ForCausalLM"),  # OLMo-3 if it has a window
    "smollm3": GgufFamily(architecture="SmolLM3ForCausalLM", constants={"no_rope_layer_interval": 4}),
    "granite": GgufFamily(
        architecture="GraniteForCausalLM",
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "seed_oss": GgufFamily(architecture="SeedOssForCausalLM", tensors={"attention_out_bias": "attn_output.bias"}),
    "arcee": GgufFamily(architecture="ArceeForCausalLM", activation="relu2"),
    "apertus": GgufFamily(architecture="ApertusForCausalLM", activation="xielu"),
    "mistral3": GgufFamily(architecture="Ministral3ForCausalLM"),
    "ernie4_5": GgufFamily(architecture="Ernie4_5ForCausalLM", tensors={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": GgufFamily(architecture="HunYuanDenseV1ForCausalLM"),
    "exaone4": GgufFamily(architecture="Exaone4ForCausalLM"),
    "glm4": GgufFamily(architecture="Glm4ForCausalLM", partial_rope=True),
    "command-r": GgufFamily(
        architecture="CohereForCausalLM",
        layer_norm=True,
        fields=_COHERE,
        tensors={"use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": GgufFamily(architecture="Cohere2ForCausalLM", layer_norm=True, fields=_COHERE),
    "nemotron": GgufFamily(architecture="NemotronForCausalLM", activation="relu2", layer_norm=True, partial_rope=True),
    "stablelm": GgufFamily(
        architecture="StableLmForCausalLM",
        layer_norm=True,
        partial_rope=True,
        fields={"use_parallel_residual": "use_parallel_residual"},
        tensors={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        constants={"qk_layernorm_stacked": True},
    ),
    "starcoder2": GgufFamily(
        architecture="Starcoder2ForCausalLM",
        activation=GELU_TANH,
        layer_norm=True,
        tensors={"use_bias": "attn_q.bias"},
    ),
    "phi2": GgufFamily(architecture="PhiForCausalLM", activation=GELU_TANH, layer_norm=True, partial_rope=True),
    "gpt2": GgufFamily(architecture="GPT2LMHeadModel", activation=GELU_TANH, layer_norm=True),
    "gptneox": GgufFamily(
        architecture="GPTNeoXForCausalLM",
        activation="gelu",
        layer_norm=True,
        partial_rope=True,
        fields={"use_parallel_residual": "use_parallel_residual"},
        constants={"qkv_by_head": False},  # the converter puts all queries first, then all keys
    ),
    "eurobert": GgufFamily(architecture="EuroBertModel", bidirectional=True),
    "bert": GgufFamily(architecture="BertModel", activation="gelu", layer_norm=True, bidirectional=True, encoder=True),
    "jina-bert-v2": GgufFamily(
        architecture="JinaBertModel",
        activation="gelu",
        layer_norm=True,
        bidirectional=True,
        encoder=True,
        tensors={"qk_post_norm": "attn_q_norm.weight", "gate_apart": "ffn_gate.weight"},
    ),
    "t5encoder": GgufFamily(
        architecture="T5EncoderModel",
        bidirectional=True,
        encoder=True,
        fields={"relative_attention_num_buckets": "attention.relative_buckets_count"},
    ),
}
"""By general.architecture."""

WINDOWED = frozenset(("llama", "gemma2", "gemma3", "phi3", "olmo2", "exaone4", "cohere2", "starcoder2"))
"""Those whose files may have an attention window."""

BY_LAYER: dict[str, int] = {"gemma3": 6, "olmo2": 4, "exaone4": 4, "cohere2": 4}
"""Those with windows in some layers only: every how many layers one sees all, if the file does not list them."""
