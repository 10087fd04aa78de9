"""Which family an architecture belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from slipstream.base.errors import BadCheckpoint, UnsupportedModel
from slipstream.checkpoint.architecture import continues_text, near_names
from slipstream.checkpoint.model_info import ModelInfo, family_name
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.encoder import EncoderShape
from slipstream.nn.families.bert import (
    albert_heads,
    albert_rules,
    albert_shape,
    bert_heads,
    bert_rules,
    bert_shape,
    distilbert_heads,
    distilbert_rules,
    electra_heads,
    electra_rules,
    electra_shape,
    mpnet_rules,
    mpnet_shape,
    plain_heads,
    roberta_rules,
    static_rules,
    static_shape,
    xlm_roberta_xl_rules,
    xlm_roberta_xl_shape,
)
from slipstream.nn.families.deberta import (
    deberta_heads,
    deberta_rules,
    deberta_shape,
    t5_heads,
    t5_rules,
    t5_shape,
)
from slipstream.nn.families.gemma import (
    gemma2_shape,
    gemma3_shape,
    gemma3n_rules,
    gemma3n_shape,
    gemma3n_text_rules,
    gemma4_rules,
    gemma4_shape,
    gemma4_text_rules,
    gemma_rules,
    gemma_shape,
    gemma_text_rules,
)
from slipstream.nn.families.layer_norm_decoders import (
    gpt2_rules,
    gpt2_shape,
    gpt_neox_rules,
    gpt_neox_shape,
    nemotron_rules,
    nemotron_shape,
    phi_rules,
    phi_shape,
    stablelm_rules,
    stablelm_shape,
    starcoder2_rules,
    starcoder2_shape,
)
from slipstream.nn.families.llama import llama_rules, llama_shape, mistral_shape
from slipstream.nn.families.llama_variants import (
    apertus_rules,
    apertus_shape,
    arcee_rules,
    arcee_shape,
    cohere2_shape,
    cohere_shape,
    ernie_shape,
    exaone4_rules,
    exaone4_shape,
    glm4_rules,
    glm4_shape,
    glm_rules,
    glm_shape,
    granite_shape,
    hunyuan_rules,
    hunyuan_shape,
    ministral3_shape,
    ministral_shape,
    nested_text_shape,
    olmo2_rules,
    olmo2_shape,
    olmo3_shape,
    phi3_rules,
    phi3_shape,
    qwen2_shape,
    qwen3_shape,
    seed_oss_shape,
    smollm3_shape,
    vision_text_rules,
)
from slipstream.nn.families.mamba import mamba1_shape, mamba2_shape, mamba_rules
from slipstream.nn.families.mamba_hybrids import (
    bamba_shape,
    falcon_h1_shape,
    granite_hybrid_rules,
    granite_hybrid_shape,
    hybrid_rules,
    jamba_shape,
    lfm2_moe_shape,
    lfm2_rules,
    lfm2_shape,
    lfm2_vl_rules,
    nemotron_h_rules,
    nemotron_h_shape,
    qwen3_5_rules,
    qwen3_5_shape,
    qwen3_next_rules,
    qwen3_next_shape,
)
from slipstream.nn.families.moe import (
    deepseek_rules,
    deepseek_v2_shape,
    deepseek_v3_shape,
    glm4_moe_shape,
    gpt_oss_rules,
    gpt_oss_shape,
    mixtral_rules,
    mixtral_shape,
    moe_rules,
    olmoe_shape,
    qwen2_moe_shape,
    qwen3_moe_shape,
    qwen3_vl_moe_shape,
    vision_text_moe_rules,
)
from slipstream.nn.families.rotary_bert import (
    eurobert_heads,
    eurobert_rules,
    gte_rules,
    gte_shape,
    jina_bert_rules,
    jina_bert_shape,
    modernbert_heads,
    modernbert_rules,
    modernbert_shape,
    nomic_rules,
    nomic_shape,
)
from slipstream.nn.pooling_heads import HeadShape
from slipstream.nn.weights.source import Rules


@dataclass(frozen=True, slots=True)
class Family:
    """The construction of a family's decoders: shape and tensor rules."""

    shape: Callable[[ModelInfo], DecoderShape]
    rules: Callable[[DecoderShape], Rules]
    heads: Callable[[ModelInfo], HeadShape] | None = None  # None: those of all decoders


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    shape: Callable[[ModelInfo], EncoderShape]
    rules: Callable[[ModelInfo], Rules]
    heads: Callable[[ModelInfo], HeadShape]


DECODERS = {
    "Llama": Family(llama_shape, llama_rules),
    "Mistral": Family(mistral_shape, llama_rules),
    "Ministral": Family(ministral_shape, llama_rules),
    "Ministral3": Family(ministral3_shape, llama_rules),
    "Qwen2": Family(qwen2_shape, llama_rules),
    "Qwen3": Family(qwen3_shape, llama_rules),
    "Gemma": Family(gemma_shape, llama_rules),
    "Gemma2": Family(gemma2_shape, gemma_rules),
    "Gemma3": Family(gemma3_shape, gemma_rules),
    "Gemma3Text": Family(gemma3_shape, gemma_rules),
    "Gemma3n": Family(gemma3n_shape, gemma3n_rules),
    "Gemma3nText": Family(gemma3n_shape, gemma3n_rules),
    "Gemma4": Family(gemma4_shape, gemma4_rules),
    "Gemma4Text": Family(gemma4_shape, gemma4_rules),
    "Phi3": Family(phi3_shape, phi3_rules),
    "Olmo2": Family(olmo2_shape, olmo2_rules),
    "Olmo3": Family(olmo3_shape, olmo2_rules),
    "SmolLM3": Family(smollm3_shape, llama_rules),
    "Granite": Family(granite_shape, llama_rules),
    "SeedOss": Family(seed_oss_shape, llama_rules),
    "Arcee": Family(arcee_shape, arcee_rules),
    "Apertus": Family(apertus_shape, apertus_rules),
    "Ernie4_5": Family(ernie_shape, llama_rules),
    "HunYuanDenseV1": Family(hunyuan_shape, hunyuan_rules),
    "Exaone4": Family(exaone4_shape, exaone4_rules),
    "Glm": Family(glm_shape, glm_rules),
    "Glm4": Family(glm4_shape, glm4_rules),
    "Cohere": Family(cohere_shape, llama_rules),
    "Cohere2": Family(cohere2_shape, llama_rules),
    "Nemotron": Family(nemotron_shape, nemotron_rules),
    "StableLm": Family(stablelm_shape, stablelm_rules),
    "Starcoder2": Family(starcoder2_shape, starcoder2_rules),
    "Phi": Family(phi_shape, phi_rules),
    "GPTNeoX": Family(gpt_neox_shape, gpt_neox_rules),
    "GPT2": Family(gpt2_shape, gpt2_rules),
    "GPT2LMHead": Family(gpt2_shape, gpt2_rules),
    "LlamaBidirectional": Family(llama_shape, llama_rules),
    "Mixtral": Family(mixtral_shape, mixtral_rules),
    "Qwen2Moe": Family(qwen2_moe_shape, moe_rules),
    "Qwen3Moe": Family(qwen3_moe_shape, moe_rules),
    "Olmoe": Family(olmoe_shape, moe_rules),
    "Glm4Moe": Family(glm4_moe_shape, moe_rules),
    "DeepseekV2": Family(deepseek_v2_shape, deepseek_rules),
    "DeepseekV3": Family(deepseek_v3_shape, deepseek_rules),
    "GptOss": Family(gpt_oss_shape, gpt_oss_rules),
    "Qwen3Next": Family(qwen3_next_shape, qwen3_next_rules),
    "Qwen3_5": Family(qwen3_5_shape, qwen3_5_rules),
    "Qwen3_5Text": Family(qwen3_5_shape, qwen3_5_rules),
    "Qwen3_5Moe": Family(qwen3_5_shape, qwen3_5_rules),
    "Qwen3_5MoeText": Family(qwen3_5_shape, qwen3_5_rules),
    "Mamba": Family(mamba1_shape, mamba_rules),
    "Mamba2": Family(mamba2_shape, mamba_rules),
    "GraniteMoeHybrid": Family(granite_hybrid_shape, granite_hybrid_rules),
    "Bamba": Family(bamba_shape, hybrid_rules),
    "FalconH1": Family(falcon_h1_shape, hybrid_rules),
    "Jamba": Family(jamba_shape, hybrid_rules),
    "NemotronH": Family(nemotron_h_shape, nemotron_h_rules),
    "Lfm2": Family(lfm2_shape, lfm2_rules),
    "Lfm2Moe": Family(lfm2_moe_shape, lfm2_rules),
}
"""By how their architectures' names begin."""
DECODER_ENDINGS = (
    "ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification", "ForRewardModel",
    "ForProcessRewardModel",
)  # fmt: skip
MULTIMODAL = {
    **{
        f"{name}ForConditionalGeneration": Family(nested_text_shape, vision_text_rules)
        for name in ("Mistral3", "Llava", "Idefics3", "SmolVLM", "InternVL", "LlavaOnevision")
    },
    "Lfm2VlForConditionalGeneration": Family(lfm2_shape, lfm2_vl_rules),
    "Qwen2VLForConditionalGeneration": Family(qwen2_shape, vision_text_rules),
    "Qwen2_5_VLForConditionalGeneration": Family(qwen2_shape, vision_text_rules),
    "Qwen3VLForConditionalGeneration": Family(qwen3_shape, vision_text_rules),
    "Qwen3VLMoeForConditionalGeneration": Family(qwen3_vl_moe_shape, vision_text_moe_rules),
    "Gemma3ForConditionalGeneration": Family(gemma3_shape, gemma_text_rules),
    "Gemma3nForConditionalGeneration": Family(gemma3n_shape, gemma3n_text_rules),
    "Gemma4ForConditionalGeneration": Family(gemma4_shape, gemma4_text_rules),
    "Qwen3_5ForConditionalGeneration": Family(qwen3_5_shape, qwen3_5_rules),
    "Qwen3_5MoeForConditionalGeneration": Family(qwen3_5_shape, qwen3_5_rules),
}
"""Multimodal models, of which the text model runs."""

BIDIRECTIONAL = {"EuroBert": Family(llama_shape, eurobert_rules, eurobert_heads)}
"""Encoders with the layers of a decoder."""

ENCODER_FAMILIES = {
    "Bert": EncoderFamily(bert_shape, bert_rules, bert_heads),
    "Roberta": EncoderFamily(bert_shape, roberta_rules, bert_heads),
    "XLMRoberta": EncoderFamily(bert_shape, roberta_rules, bert_heads),
    "Camembert": EncoderFamily(bert_shape, roberta_rules, bert_heads),
    "XLMRobertaXL": EncoderFamily(xlm_roberta_xl_shape, xlm_roberta_xl_rules, bert_heads),
    "Electra": EncoderFamily(electra_shape, electra_rules, electra_heads),
    "Albert": EncoderFamily(albert_shape, albert_rules, albert_heads),
    "DebertaV2": EncoderFamily(deberta_shape, deberta_rules, deberta_heads),
    "JinaBert": EncoderFamily(jina_bert_shape, jina_bert_rules, bert_heads),
    "T5Encoder": EncoderFamily(t5_shape, t5_rules, t5_heads),
    "MT5Encoder": EncoderFamily(t5_shape, t5_rules, t5_heads),
    "DistilBert": EncoderFamily(bert_shape, distilbert_rules, distilbert_heads),
    "MPNet": EncoderFamily(mpnet_shape, mpnet_rules, bert_heads),
    "ModernBert": EncoderFamily(modernbert_shape, modernbert_rules, modernbert_heads),
    "NomicBert": EncoderFamily(nomic_shape, nomic_rules, bert_heads),
    "New": EncoderFamily(gte_shape, gte_rules, bert_heads),
    "Gte": EncoderFamily(gte_shape, gte_rules, bert_heads),
    "HF_ColBERT": EncoderFamily(bert_shape, bert_rules, bert_heads),
    "StaticEmbedding": EncoderFamily(static_shape, static_rules, plain_heads),
}
ENCODER_ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")


def has_family(architecture: str) -> bool:
    family = family_name(architecture)
    return architecture in MULTIMODAL or family in DECODERS or family in BIDIRECTIONAL or family in ENCODER_FAMILIES


def find_family(info: ModelInfo) -> Family | EncoderFamily:
    name = info.architecture
    family = family_name(name)
    if name in MULTIMODAL:
        return MULTIMODAL[name]
    if family in DECODERS and name.removeprefix(family) in DECODER_ENDINGS:
        return DECODERS[family]
    if family in BIDIRECTIONAL and name.removeprefix(family) in ENCODER_ENDINGS:
        return BIDIRECTIONAL[family]
    if family in ENCODER_FAMILIES and (name.removeprefix(family) in ENCODER_ENDINGS or name == family == "HF_ColBERT"):
        return ENCODER_FAMILIES[family]
    causal = [known + ("Model" if known.endswith("LMHead") else "ForCausalLM") for known in DECODERS]
    known = (*causal, *MULTIMODAL, *ENCODER_FAMILIES, *BIDIRECTIONAL)
    raise UnsupportedModel(f"{name} is not an architecture we run; {near_names(name, known)}")


def find_shape(info: ModelInfo) -> DecoderShape | EncoderShape:
    """The shape of a model, by its family and by the purpose of its checkpoint."""
    if info.backend_folder:
        from slipstream.nn.transformers_modules import transformers_shape  # the library is optional

        return transformers_shape(info)
    family = find_family(info)
    try:
        shape = family.shape(info)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadCheckpoint(f"config.json of {info.architecture} has a wrong value: {error}") from None
    check_shape(info.architecture, shape)
    if isinstance(shape, EncoderShape):
        return shape
    if not shape.mixers:
        raise UnsupportedModel(
            f"{info.architecture} has {len(shape.layers)} layers and none with attention or a recurrent state, so that "
            "a token would not depend on the ones before it; such a model is not supported"
        )
    continues = continues_text(info.architecture)
    if not info.is_causal:
        _check_bidirectional(info, shape)
        is_gemma = family_name(info.architecture).startswith("Gemma")  # whose windows are those of one side already
        # a window that ends at a token becomes one to each side of it
        shape = shape.map_attention(
            lambda mixer: replace(mixer, causal=False, window=mixer.window if is_gemma else max(mixer.window - 1, 0))
        )
    return replace(shape, headless=not continues or not info.has_lm_head)


def _check_bidirectional(info: ModelInfo, shape: DecoderShape) -> None:
    """Raises UnsupportedModel for what bidirectional attention does not have."""
    if any(mixer.sinks for mixer in shape.attentions):
        raise UnsupportedModel(
            f"{info.architecture} attends in both directions; sinks are supported for causal attention only"
        )
    if any(mixer.latent is not None for mixer in shape.attentions):
        raise UnsupportedModel(
            f"{info.architecture} attends in both directions; latent attention is supported for causal attention only"
        )
    if any(mixer.kv_source is not None for mixer in shape.attentions):
        raise UnsupportedModel(
            f"{info.architecture} attends in both directions; shared KV caches are supported for causal attention only"
        )
    if any(mixer.state_fields("float32") for mixer in shape.mixers):
        raise UnsupportedModel(
            f"{info.architecture} attends in both directions; its recurrent layers see earlier tokens only"
        )


def find_heads(info: ModelInfo) -> HeadShape:
    """The layers of a checkpoint behind its hidden states."""
    if info.backend_folder:
        return HeadShape()
    family = find_family(info)
    if family.heads is not None:
        return family.heads(info)
    if info.architecture.endswith("RewardModel"):
        return HeadShape(classifier_bias=True, transform="relu")
    if info.architecture.endswith("ForTokenClassification"):
        return HeadShape(classifier_bias=True)
    return HeadShape(classifier_bias=False if info.architecture.endswith("ForSequenceClassification") else None)


def find_rules(info: ModelInfo, shape: DecoderShape | EncoderShape) -> Rules:
    family = find_family(info)
    if isinstance(family, EncoderFamily):
        return family.rules(info)
    assert isinstance(shape, DecoderShape)
    return family.rules(shape)


# check_shape: rejects a model whose layers have impossible sizes, before a kernel or an allocation gets them.
#
# `check_info` looks at the sizes that all models have; these are the ones that a family reads itself from config.json.

# maxima far beyond any model, as in check_info
_MOST = 2**24
_MAX = {
    "vocab_size": 2**27,
    "size": 2**27,
    "max_positions": 2**31 - 1,
    "window": 2**31 - 1,
    "length": 2**31 - 1,
    "num_experts": 2**16,
    "num_layers": 2**12,
    "num_copies": 2**8,
    "conv_width": 2**8,
}
# may be 0 although 0 is not the default: no such part, or an index
_FROM_0 = {"q_rank", "active", "rank", "num_buckets", "num_layers"}


def check_shape(architecture: str, shape: Any) -> None:
    """Raises BadCheckpoint for a size or factor anywhere in `shape` that no model has."""
    for field in fields(shape):
        value = getattr(shape, field.name)
        parts: list[Any] = []
        for each in value if isinstance(value, tuple) else (value,):
            if is_dataclass(each):
                if each not in parts:  # most layers are equal
                    parts.append(each)
                    check_shape(architecture, each)
            elif isinstance(each, float) and not math.isfinite(each) and each != field.default:
                raise BadCheckpoint(_wrong(architecture, field.name, each, "must be finite"))
            elif isinstance(each, int) and "int" in str(field.type):  # annotations are texts
                least = 0 if field.default in (0, None, ()) or field.name in _FROM_0 else 1
                most = _MAX.get(field.name, _MOST)
                if isinstance(each, bool) or not least <= each <= most:
                    raise BadCheckpoint(_wrong(architecture, field.name, each, f"must be {least} to {most:,}"))


def _wrong(architecture: str, name: str, value: object, need: str) -> str:
    return f"config.json of {architecture} has a wrong value: {name} is {value}, and {need}; download it again"
