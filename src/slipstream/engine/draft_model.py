"""settle_draft: locates and checks the model of a drafter, before anything is loaded."""

from __future__ import annotations

from slipstream.cache_spec import CacheSpec
from slipstream.config.check_info import check_info
from slipstream.config.config import DraftModelConfig, ModelConfig
from slipstream.config.draft_config import WITH_MODEL, DraftConfig, read_draft_config
from slipstream.config.gguf_file import GgufFile
from slipstream.config.gguf_info import gguf_model_info
from slipstream.config.locate import LocatedModel, locate
from slipstream.config.model_info import ModelInfo, read_model_info
from slipstream.config.options import Options
from slipstream.config.weight_files import require_weights
from slipstream.errors import InvalidOption, ModelError
from slipstream.nn.models.decoder_shape import DecoderShape
from slipstream.nn.models.draft_layout import mtp_shape
from slipstream.nn.models.registry import find_shape
from slipstream.nn.models.stored_head import as_stored


def settle_draft(
    options: Options, located: LocatedModel, info: ModelInfo, specs: list[CacheSpec], dtype: str, *, on_cpu: bool
) -> tuple[DraftModelConfig, list[CacheSpec]] | None:
    """The model of the drafter that the options ask for, and its cache specs; None: drafts need no model. `located`,
    `info` and `specs` are those of the engine's model. The length is the drafter's own until `resolve` sets it."""
    drafts = read_draft_config(options.speculative_config, options.drafts)
    if drafts is None or drafts.method not in WITH_MODEL:
        return None
    try:
        located = located if drafts.model is None else locate(drafts.model)
        own, shape = _find(drafts, options, located, info)
    except ModelError as error:
        raise type(error)(f"the draft model of speculative_config: {error}") from error
    found = shape.cache_specs(options.page_size, dtype)
    model = ModelConfig(
        info=own,
        path=str(located.path),
        name=located.name,
        load_format=_load_format(options, located),
        dtype=dtype,
        dequantize=options.dequantize,
        max_model_len=own.max_positions,
        seed=options.seed,
        deterministic=options.deterministic,
        sizes=shape.sizes(on_cpu),
    )
    page_bytes = sum(spec.bytes_per_page for spec in found)
    return DraftModelConfig(drafts.method, model, len(specs), page_bytes), found


def _find(
    drafts: DraftConfig, options: Options, located: LocatedModel, info: ModelInfo
) -> tuple[ModelInfo, DecoderShape]:
    """The facts of the drafter's model, and its shape as a decoder."""
    if drafts.method == "mtp":
        if located.kind == "gguf":
            raise InvalidOption("drafts by mtp need a folder with safetensors, and the model is a .gguf file")
        return info, mtp_shape(info)
    own = _read(options, located)
    return own, _check(own, located.name, info)


def _read(options: Options, located: LocatedModel) -> ModelInfo:
    if located.kind == "gguf":
        return check_info(gguf_model_info(GgufFile.open(located.path)))
    if options.load_format != "dummy":
        require_weights(located.path)
    info = check_info(read_model_info(located.path))
    return info if options.load_format == "dummy" else as_stored(info, located.path)


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
