"""Every field of config.json that transformers' code of a family reads changes what our family makes of it, is refused,
or is listed here with the reason why results do not depend on it."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

import tiny_encoder
from slipstream.base.errors import SlipstreamError
from slipstream.checkpoint.model_info import check_info, model_info_from_config
from slipstream.nn.registry import find_heads, find_shape
from tiny import _COMMON, _FAMILIES, LONG_ROPE, _write_config
from tiny_families import MORE
from tiny_saved import NEMOTRON_3, SAVED

# reasons why a field is not read, by its name
_TRAINING = (
    "altup_coef_clip", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout",
    "classifier_dropout_prob", "cls_dropout", "dropout", "dropout_rate", "embd_pdrop", "embedding_dropout",
    "hidden_dropout", "hidden_dropout_prob", "initializer_cutoff_factor", "initializer_factor", "initializer_range",
    "mlp_dropout", "output_router_logits", "pooler_dropout", "problem_type", "qa_dropout", "rescale_prenorm_residual",
    "resid_pdrop", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise", "seq_classif_dropout",
    "sinusoidal_pos_embds", "sparse_pred_ignore_index", "sparse_prediction", "summary_first_dropout",
    "summary_last_dropout", "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_scale",
    "z_loss_coefficient",
)  # fmt: skip
_CALL = (
    "add_cross_attention", "chunk_size", "chunk_size_feed_forward", "deterministic_flash_attn", "is_encoder_decoder",
    "mamba_chunk_size", "num_logits_to_keep", "output_attentions", "output_hidden_states", "pad_token_id",
    "reorder_and_upcast_attn", "residual_in_fp32", "return_dict", "use_associative_scan", "use_cache", "use_mambapy",
)  # fmt: skip
_OF_TENSORS = ("decoder_bias", "pooler_hidden_size", "attention_head_size", "num_labels", "layers_num_experts")
_OTHER_TASKS = ("num_decoder_layers", "scale_decoder_outputs")
_FINE = {
    **dict.fromkeys(_TRAINING, "weights at their start, or training only"),
    **dict.fromkeys(_CALL, "how a call computes, not what"),
    **dict.fromkeys(_OF_TENSORS, "the sizes of the tensors say it, and are checked"),
    **dict.fromkeys(_OTHER_TASKS, "of a part or task that does not run here"),
    "_attn_implementation": "kernels of the library",
}
_FINE_IN = {
    "gemma3": {"attn_logit_softcapping": "assigned, and not used"},
    "gpt2": {"summary_activation": "", "summary_proj_to_labels": "", "summary_type": "", "summary_use_proj": ""},
    "electra": {"summary_activation": "", "summary_proj_to_labels": "", "summary_type": "", "summary_use_proj": ""},
    "t5": {"dense_act_fn": "feed_forward_proj", "is_gated_act": "feed_forward_proj", "is_decoder": "set by the class"},
    "mamba": {"time_step_min": "weights at their start"},
    "mamba2": {"time_step_min": "weights at their start", "time_step_rank": "not used"},
    "qwen3_moe": {"num_experts": "another name of num_local_experts"},
    "deberta": dict.fromkeys(("conv_act", "conv_groups"), "a convolution is refused"),
    "olmoe": {"sliding_window": "only kernels of flash attention read it"},
    "modernbert": {"classifier_pooling": "read_pooling reads it"},
}
_ENCODERS = {"is_causal": "of a decoder's mask, and is_decoder is refused"}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None}
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"), (_WINDOWS,)),
    "phi3": ({"rope_scaling": LONG_ROPE},),
    "exaone4": ({"layer_types": None, "sliding_window_pattern": 2},),
    "nemotron_h": (NEMOTRON_3,),
    "falcon_h1": ({"mamba_rms_norm": True}, {"mamba_d_ssm": None, "mamba_d_head": 16}),
    "gemma4": ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},),
    "gpt2": ({"intermediate_size": None},),
    "deberta": ({"position_buckets": -1},),
}
"""Fields without which others do nothing."""
_TASKS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
_MASKS = {
    "create_causal_mask": "is_causal",
    "create_sliding_window_causal_mask": "sliding_window",
    "create_chunked_causal_mask": "attention_chunk_size",
}
"""Functions of the library that make a mask, and the fields that they read."""

Config = dict[str, Any]


def configs(family: str, folder: Path) -> list[Config]:
    """config.json of the family in all its variants."""
    if family in tiny_encoder._FAMILIES:
        prefix, facts = tiny_encoder._FAMILIES[family]
        settings = tiny_encoder._COMMON | facts
        if family in ("distilbert", "t5"):  # fields of their own names
            kept = tiny_encoder._DISTIL if family == "distilbert" else ("vocab_size",)
            settings = {name: value for name, value in settings.items() if name not in _OWN or name in kept}
        config = getattr(transformers, f"{prefix.removesuffix('Encoder')}Config")(**settings).to_dict()
        tasks = _TASKS if prefix != "T5Encoder" else ("Model",)
        found = [config | {"architectures": [prefix + task]} for task in tasks]
    else:
        own = SAVED.get(family) or MORE.get(family) or _FAMILIES[family]
        _write_config(folder, family, _COMMON | own, torch.float32)
        found = [msgspec.json.decode((folder / "config.json").read_bytes())]
    return [one | more for more in ({}, *_VARIANTS.get(family, ())) for one in found]


_OWN = frozenset(tiny_encoder._COMMON)


def seen_by_us(config: Config) -> str:
    """What our family makes of it, or that it is refused."""
    try:
        info = check_info(model_info_from_config(copy.deepcopy(config)))
        return repr((msgspec.structs.replace(info, extra={}), find_shape(info), find_heads(info)))
    except SlipstreamError:
        return "refused"


@cache
def fields_of_library(model_type: str) -> Mapping[str, bool]:
    """The fields that transformers' code for the model reads; True: also where the config class has no such field."""
    module = inspect.getmodule(transformers.CONFIG_MAPPING[model_type])
    assert module is not None
    source = inspect.getsource(importlib.import_module(module.__name__.replace("configuration_", "modeling_")))
    return dict(_fields(source))


def _fields(source: str) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                if owner == "config":
                    yield name, False
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                if ast.unparse(owner) in ("config", "self.config"):
                    yield name, True
            case ast.Call(func=ast.Name(id=made)) if made in _MASKS:
                yield _MASKS[made], True


def others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value * 2 + 1, value + 1, value * 2, 301]
        case float():
            return [value * 1.5 + 0.25, value / 2 + 0.125]
        case str():
            return ["other"]
        case list():
            return [[1], value[::-1], value[1:], [each * 2 + 1 for each in value if isinstance(each, int | float)]]
        case dict():
            return [{"rope_type": "linear", "factor": 3.0}]
    return [2, 2.5, True, "other", [1], False]


def ignored(family: str, folder: Path, seen: Callable[[Config], str] = seen_by_us) -> list[str]:
    """Fields that the library reads and another value of which changes nothing here."""
    variants = configs(family, folder)
    fine = _FINE | _FINE_IN.get(family, {}) | (_ENCODERS if family in tiny_encoder._FAMILIES else {})
    model_type = variants[0]["model_type"]
    usual = transformers.CONFIG_MAPPING[model_type]().to_dict()
    left = {
        name for name, always in fields_of_library(model_type).items() if (always or name in usual) and name not in fine
    }
    bases = [(config, seen(config)) for config in variants]
    assert bases[0][1] != "refused"
    for config, base in bases:
        full = usual | config
        if base != "refused":
            left = {n for n in left if all(seen(config | {n: other}) == base for other in others(full.get(n)))}
    return sorted(left)


_ALL = [*_FAMILIES, *MORE, *SAVED, *tiny_encoder._FAMILIES]


@pytest.mark.parametrize("family", _ALL)
def test_no_field_that_the_library_reads_is_ignored(tmp_path: Path, family: str) -> None:
    assert ignored(family, tmp_path) == []


def test_the_search_finds_fields_that_are_ignored(tmp_path: Path) -> None:
    def blind(config: Config) -> str:
        return seen_by_us({name: value for name, value in config.items() if name != "attention_multiplier"})

    assert ignored("granite", tmp_path, blind) == ["attention_multiplier"]
    assert {"hidden_size", "rms_norm_eps", "is_causal"} <= set(ignored("llama", tmp_path, lambda config: "same"))


def test_an_exception_is_one_for_a_field_that_the_library_reads(tmp_path: Path) -> None:
    read: set[str] = set()
    for family in _ALL:
        fields = fields_of_library(configs(family, tmp_path)[0]["model_type"]).keys()
        assert _FINE_IN.get(family, {}).keys() <= fields, family
        read |= fields
    assert read >= _FINE.keys()
