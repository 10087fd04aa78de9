"""ReasoningConfig: how a model marks its reasoning, from the option `reasoning_config`, which has vLLM's names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.errors import InvalidOption

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
