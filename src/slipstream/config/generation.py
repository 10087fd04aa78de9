"""Sampling defaults from a model's generation_config.json, and those of the embedded default model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import BadCheckpoint, InvalidOption, InvalidParams
from slipstream.params import SamplingParams

# generation_config.json names -> SamplingParams names
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Empty if the model has no defaults."""

    params: dict[str, Any] = {}  # fields of SamplingParams
    eos_token_ids: tuple[int, ...] = ()  # end tokens that replace those of config.json; empty: none are named


EMBEDDED_DEFAULTS = GenerationDefaults(params={"temperature": 0.2, "top_p": 0.9})
"""For the embedded SmolLM2: its file has no defaults, and its authors recommend these."""


def read_generation_defaults(
    folder: Path, source: str = "auto", overrides: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """Of the model's folder. `source`: auto; vllm, for no sampling defaults of the model; or another folder.
    `overrides`: fields that replace those of the file."""
    own = _read(folder / "generation_config.json")
    config = own
    if source == "vllm":  # its end tokens are no sampling defaults
        config = {name: own[name] for name in ("eos_token_id",) if name in own}
    elif source != "auto":
        path = Path(source).expanduser() / "generation_config.json"
        if not path.is_file():
            raise InvalidOption(
                f"generation_config is {source!r}, which has no {path.name}; give auto, vllm or a folder"
            )
        config = _read(path)
    if overrides:
        try:
            generation_defaults(dict(overrides))
        except InvalidParams as error:
            raise InvalidOption(f"override_generation_config: {error}") from None
    try:
        return generation_defaults({**config, **(overrides or {})})
    except InvalidParams as error:
        raise BadCheckpoint(f"{folder / 'generation_config.json'}: {error}, or remove the line") from None


def _read(path: Path) -> dict[str, Any]:
    """The file's fields; none where there is no file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
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
