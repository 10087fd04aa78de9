"""Sampling defaults from a model's generation_config.json or GGUF file, and those of the embedded default model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import BadCheckpoint, InvalidOption, InvalidParams
from slipstream.base.files import load_json
from slipstream.params.sampling import PARAMS, SamplingParams

# generation_config.json names -> SamplingParams names
_FIELDS = {row.config: name for name, row in PARAMS.items() if row.config}
_OTHER_FIELDS = ("do_sample", "eos_token_id")
# fields of GGUF files, which converters fill from generation_config.json
_GGUF_FIELDS = {f"general.sampling.{row.gguf}": name for name, row in PARAMS.items() if row.gguf}


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Empty if the model has no defaults."""

    params: dict[str, Any] = {}  # fields of SamplingParams
    eos_token_ids: tuple[int, ...] = ()  # end tokens that replace those of config.json; empty: none are named


EMBEDDED_DEFAULTS = GenerationDefaults(params={"temperature": 0.2, "top_p": 0.9})
"""For the embedded SmolLM2: its file has no defaults, and its authors recommend these."""


def read_generation_defaults(
    path: Path, source: str = "auto", overrides: Mapping[str, Any] | None = None, gguf: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """The defaults of the model's folder, or of the file whose fields are `gguf`. `source`: auto; vllm, for no sampling
    defaults of the model; or another folder. `overrides`: fields that replace those of the file."""
    shown = path / "generation_config.json" if gguf is None else path
    own = _read(shown) if gguf is None else {_GGUF_FIELDS[name]: gguf[name] for name in _GGUF_FIELDS if name in gguf}
    config = own
    if source == "vllm":  # its end tokens are no sampling defaults
        config = {name: own[name] for name in ("eos_token_id",) if name in own}
    elif source != "auto":
        shown = Path(source).expanduser() / "generation_config.json"
        if not shown.is_file():
            raise InvalidOption(
                f"generation_config is {source!r}, which has no {shown.name}; give auto, vllm or a folder"
            )
        config = _read(shown)
    if overrides:
        if unknown := [name for name in overrides if name not in _FIELDS and name not in _OTHER_FIELDS]:
            known = ", ".join((*_FIELDS, *_OTHER_FIELDS))
            raise InvalidOption(f"override_generation_config has {unknown[0]!r}, which nothing reads; it takes {known}")
        try:
            generation_defaults(dict(overrides))
        except InvalidParams as error:
            raise InvalidOption(f"override_generation_config: {error}") from None
    try:
        return generation_defaults({**config, **(overrides or {})})
    except InvalidParams as error:
        remedy = "remove the line" if gguf is None else "set generation_config to vllm, for no defaults of the file"
        raise BadCheckpoint(f"{shown}: {error}, or {remedy}") from None


def _read(path: Path) -> dict[str, Any]:
    """The file's fields; none if there is no file."""
    try:
        config = load_json(path)
    except (FileNotFoundError, NotADirectoryError):  # a .gguf file is no folder
        return {}
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download it again or remove it") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} does not hold an object; download it again or remove it")
    return config


def override_fields(name: str, given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The fields of an option that is an object, or its JSON text."""
    if isinstance(given, str):
        try:
            return msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise InvalidOption(f"{name} is {given!r:.100}; give a JSON object of fields and values") from None
    return dict(given or {})


def generation_defaults(config: dict[str, Any]) -> GenerationDefaults:
    params = {ours: config[theirs] for theirs, ours in _FIELDS.items() if config.get(theirs) is not None}
    if config.get("do_sample") is False:
        params["temperature"] = 0.0
    SamplingParams(**params)  # checked here, so that an error in the file is not reported as an error of a request
    return GenerationDefaults(params=params, eos_token_ids=_ids(config.get("eos_token_id")))


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InvalidParams(f"eos_token_id is {value!r}; give a token id or a list of them")
    return tuple(dict.fromkeys(ids))


# ReasoningConfig: how a model marks its reasoning, from the option `reasoning_config`, which has vLLM's names.

_KEYS = ("reasoning_start_str", "reasoning_end_str")
_EXAMPLE = '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'


class ReasoningConfig(msgspec.Struct, frozen=True):
    start: str
    end: str  # written when the thinking budget is used; may have text before the marker


def read_reasoning_config(given: Mapping[str, Any] | str | None) -> ReasoningConfig | None:
    """The configuration from an object or its JSON text."""
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise InvalidOption(f"reasoning_config is {given!r}; give a JSON object, as {_EXAMPLE}") from None
    for name in given:
        if name not in _KEYS:
            near = difflib.get_close_matches(str(name), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else "it takes " + " and ".join(_KEYS)
            raise InvalidOption(f"reasoning_config has no field {name!r}; {hint}")
    for name in _KEYS:
        if not isinstance(given.get(name), str) or not given[name].strip():
            raise InvalidOption(f"{name} of reasoning_config is {given.get(name)!r}; give a text, as in {_EXAMPLE}")
    return ReasoningConfig(given[_KEYS[0]], given[_KEYS[1]])
