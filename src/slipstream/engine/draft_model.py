"""settle_draft: locates and checks the model of a drafter, before anything is loaded."""

from __future__ import annotations

import msgspec

from slipstream.base.errors import InvalidOption, ModelError
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.gguf_info import gguf_model_info
from slipstream.checkpoint.locate import LocatedModel, locate, require_weights
from slipstream.checkpoint.model_info import ModelInfo, check_info, read_model_info
from slipstream.checkpoint.quantization import choose_quantization
from slipstream.config.config import WITH_MODEL, DraftConfig, DraftModelConfig, ModelConfig, read_draft_config
from slipstream.config.options import Options
from slipstream.contracts.cache_spec import CacheSpec
from slipstream.nn.decoder import DecoderShape
from slipstream.nn.drafters.dflash import check_block, dflash_taps
from slipstream.nn.drafters.draft_layout import (
    check_mtp_tensors,
    dflash_shape_of,
    eagle3_shape_of,
    eagle_shape_of,
    local_draft_shape,
    mtp_shape,
)
from slipstream.nn.drafters.eagle import tapped_layers
from slipstream.nn.load import as_stored
from slipstream.nn.registry import find_shape

_HEADS = ("eagle", "eagle3", "dflash")
"""Methods whose model is no language model by itself."""
_ARCHITECTURES = {"DFlash": "dflash", "Eagle3": "eagle3", "Eagle": "eagle"}
_OF_EAGLE3 = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
"""Fields of config.json that only EAGLE-3 heads have."""
_NAMES = {"eagle3": "eagle3", "eagle-": "eagle", "dflash": "dflash"}
"""Parts of names by which vLLM finds the method of a model that was given without one."""


def settle_draft(
    options: Options,
    located: LocatedModel,
    info: ModelInfo,
    specs: list[CacheSpec],
    dtype: str,
    cache_dtype: str,
    *,
    on_cpu: bool,
) -> tuple[DraftModelConfig, list[CacheSpec]] | None:
    """The model of the drafter in the options, and its cache specs; None: drafts need no model. `located`,
    `info` and `specs` are those of the engine's model. The length is the drafter's own until `resolve` sets it."""
    drafts = read_draft_config(options.speculative_config, options.drafts)
    if drafts is None or drafts.method not in WITH_MODEL:
        return None
    try:
        located = located if drafts.model is None else locate(drafts.model)
        method, own = drafts.method, info
        if method == "mtp":  # a part of the engine's model, with its formats
            quantization = choose_quantization(options.quantization, own.quantization, located.kind == "gguf")
        else:
            own = _read(options, located)
            method, quantization = _find_method(drafts, own, located.name), own.quantization
        if method == "draft_model" and options.load_format != "dummy" and located.kind != "gguf":
            own = as_stored(own, located.path)
        model = ModelConfig(
            info=own,
            path=str(located.path),
            name=located.name,
            load_format=_load_format(options, located),
            dtype=dtype,
            dequantize=options.dequantize,
            max_model_len=own.max_positions,
            seed=options.seed,
            keeps_bfloat16=options.dtype == "auto",
            deterministic=options.deterministic,
            quantization=quantization,
            num_ranks=options.tensor_parallel_size,
            by_expert=options.enable_expert_parallel,
        )
        whole, taps = _find(method, model, info)
        shape = _divided(model, whole)
        if method == "dflash":
            check_block(own, drafts.num_drafts)
    except ModelError as error:
        raise type(error)(f"the draft model of speculative_config: {error}") from error
    model = msgspec.structs.replace(model, sizes=shape.sizes(on_cpu))
    if method in _HEADS:  # as long as the engine's model, whatever the head was trained with
        model = msgspec.structs.replace(model, info=msgspec.structs.replace(own, max_positions=info.max_positions))
    found = shape.cache_specs(options.page_size, cache_dtype)
    page_bytes = sum(spec.bytes_per_page for spec in found)
    return DraftModelConfig(method, model, len(specs), page_bytes, taps), found


def _divided(model: ModelConfig, shape: DecoderShape) -> DecoderShape:
    """The part of one rank."""
    try:
        return local_draft_shape(model, shape)
    except InvalidOption as error:
        raise InvalidOption(f"the draft model of speculative_config: {error}") from error


def _find(method: str, model: ModelConfig, info: ModelInfo) -> tuple[DecoderShape, tuple[int, ...]]:
    """The shape of the drafter's model as a decoder, and the layers of the engine's model whose inputs it reads."""
    if method == "draft_model":
        return _check(model.info, model.name, info), ()
    if model.load_format == "gguf":
        raise InvalidOption(f"drafts by {method} need a folder with safetensors; {model.name} is a .gguf file")
    if method == "mtp":
        shape = mtp_shape(info)
        if model.load_format != "dummy":
            check_mtp_tensors(model)
        return shape, ()
    target = find_shape(info)
    if not isinstance(target, DecoderShape):
        raise InvalidOption(f"drafts by {method} are for models that generate text")
    if method == "eagle":
        return eagle_shape_of(model, target).decoder, ()
    if method == "dflash":
        return dflash_shape_of(model, target).decoder, dflash_taps(model.info, len(target.layers))
    return eagle3_shape_of(model, target).decoder, tapped_layers(model.info, len(target.layers))


def _read(options: Options, located: LocatedModel) -> ModelInfo:
    if located.kind == "gguf":
        return check_info(gguf_model_info(GgufFile.open(located.path)))
    if options.load_format != "dummy":
        require_weights(located.path)
    return check_info(read_model_info(located.path))


def _find_method(drafts: DraftConfig, info: ModelInfo, name: str) -> str:
    """The given method, if the model is made for it. EAGLE-3 heads are found by their config, as in vLLM: many have
    the architecture of the model that they are for, as those of EAGLE 1 and 2 have."""
    method = drafts.method
    known = next((own for part, own in _ARCHITECTURES.items() if part in info.architecture), "")
    if not known and any(info.extra.get(field) for field in _OF_EAGLE3):
        known = "eagle3"
    if not drafts.is_given:
        return known or next((own for part, own in _NAMES.items() if part in name.lower()), method)
    if method == "eagle" and known == "eagle3":
        return known
    if method != known and (known or method not in ("eagle", "draft_model")):
        known = known or "draft_model, or eagle for a head"
        raise InvalidOption(f"{name} is {info.architecture}; its method is {known}, not {method}")
    return method


def _load_format(options: Options, located: LocatedModel) -> str:
    if options.load_format == "dummy":
        return "dummy"
    return "gguf" if located.kind == "gguf" else "safetensors"


def _check(own: ModelInfo, name: str, info: ModelInfo) -> DecoderShape:
    """The shape of a draft model. Raises an error that says why it cannot draft for the engine's model."""
    shape = find_shape(own)
    if not isinstance(shape, DecoderShape) or not shape.causal or shape.headless:
        raise InvalidOption(f"{name} cannot draft: it generates no text; give a causal language model")
    if shape.state_specs("float32"):
        raise InvalidOption(
            f"{name} cannot draft: a rejected draft cannot be taken back from its recurrent states; give a model "
            "with attention only"
        )
    if own.vocab_size != info.vocab_size:
        raise InvalidOption(
            f"the draft model {name} has {own.vocab_size} tokens in its vocabulary and the model {info.vocab_size}; "
            "give a draft model of the same family, with the same vocabulary"
        )
    if own.rope.short_length(own.max_positions) is not None:
        raise InvalidOption(
            f"{name} cannot draft: its rope has factors for short and for long requests (LongRoPE), which draft models "
            "do not support; give another draft model"
        )
    return shape
