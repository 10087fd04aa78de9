"""The architecture that config.json names, or that its model_type implies.

Some published configs have a model_type and no architectures. A model_type names the backbone, not the head: an encoder
is then loaded as a plain backbone, a decoder as a causal LM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from slipstream.errors import BadCheckpoint, UnsupportedModel

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
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
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
