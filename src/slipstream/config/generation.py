"""Sampling defaults from a model's generation_config.json, and those of the embedded default model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import BadCheckpoint, InvalidParams
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


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return GenerationDefaults()
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}; download it again or remove it") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} does not hold an object; download it again or remove it")
    try:
        return generation_defaults(config)
    except InvalidParams as error:
        raise BadCheckpoint(f"{path}: {error}, or remove the line") from None


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
