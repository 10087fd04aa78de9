"""Which code runs a model: a family of this package, or the module of the transformers library."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import InvalidOption, UnsupportedModel
from slipstream.base.files import load_json
from slipstream.checkpoint.architecture import find_architecture
from slipstream.checkpoint.model_info import ModelInfo, read_model_info
from slipstream.checkpoint.sentence_modules import static_folder
from slipstream.config.options import Options
from slipstream.nn.registry import find_family, has_family

log = logging.getLogger(__name__)


def read_info(options: Options, folder: Path, changes: Mapping[str, Any]) -> ModelInfo:
    """The ModelInfo of a folder, for the implementation that `model_impl` selects. `changes`: of config.json."""
    if options.model_impl == "transformers":
        return _backend_info(folder, changes)
    if options.model_impl == "auto" and not _has_own_family(folder):
        try:
            info = _backend_info(folder, changes)
        except UnsupportedModel as reason:
            try:
                find_family(read_model_info(folder, dict(changes)))
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{error}; and {reason}") from None
            raise
        log.warning("%s", describe_backend(info))
        return info
    return read_model_info(folder, dict(changes))


def _has_own_family(folder: Path) -> bool:
    """True as well for a config.json that cannot be read, which is reported where it is read."""
    if static_folder(folder) is not None:
        return True
    try:
        config = load_json(folder / "config.json")
        return not isinstance(config, dict) or has_family(find_architecture(config))
    except UnsupportedModel:
        return False
    except (OSError, ValueError):
        return True


def _backend_info(folder: Path, changes: Mapping[str, Any]) -> ModelInfo:
    from slipstream.nn.transformers_modules import transformers_info  # the library is optional

    if changes:
        raise InvalidOption("hf_overrides are for families of our own, and transformers' module runs this model")
    return transformers_info(str(folder))


def describe_backend(info: ModelInfo) -> str:
    """A line for the log: how transformers' module runs, and what a family of our own would do faster."""
    fact = f"{info.architecture} has no family of our own: transformers' module runs it, with our attention"
    faster = "a family of our own would have fused norms and GEMMs"
    if not info.backend_waits:
        return f"{fact}, in CUDA graphs on a GPU; {faster}"
    waits = ", ".join(info.backend_waits[:3]) + (" and others" if len(info.backend_waits) > 3 else "")
    return f"{fact}, launched kernel by kernel: it waits for the device at {waits}; {faster}, and CUDA graphs"


def for_backend(options: Options, info: ModelInfo) -> Options:
    """Options with what transformers' module needs. Raises InvalidOption for what it cannot do."""
    if not info.backend_folder:
        return options
    if options.deterministic:
        raise InvalidOption(
            f"deterministic is set, and {info.architecture} runs by transformers' module, whose GEMMs depend on the "
            "batch; leave it out"
        )
    if options.quantization is not None:
        raise InvalidOption(
            f"quantization is {options.quantization!r}, and {info.architecture} runs by transformers' module, whose "
            "weights are not quantised; leave it out"
        )
    return msgspec.structs.replace(options, enforce_eager=options.enforce_eager or bool(info.backend_waits))
