"""Properties of each architecture that GGUF files name, for `config/gguf_info.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
