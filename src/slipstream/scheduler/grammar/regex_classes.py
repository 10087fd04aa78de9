r"""\d, \w, \D and \W of regular expressions mean ASCII, as in JSON schemas (ECMA-262) and in vLLM's default backend.

For llguidance they mean Unicode, so that an answer could have the digits of any script for \d.
"""

from __future__ import annotations

import json
import re
from typing import Any

# as sets in brackets, which are allowed inside of other sets too
_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_IN_JSON = re.compile(r"\\\\[dDwW]")
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name


def ascii_classes(regex: str) -> str:
    return _ESCAPE.sub(lambda found: _CLASSES.get(found[0], found[0]), regex)


def ascii_patterns(schema: str) -> str:
    """A JSON schema, as text, with its regular expressions about ASCII."""
    if not _IN_JSON.search(schema):
        return schema
    found: Any = json.loads(schema)
    left: list[Any] = [found]
    while left:  # no recursion: schemas may be deep
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += [value for name, value in part.items() if name not in _VALUES and name not in _MAPS]
            for name in _MAPS:
                if isinstance(named := part.get(name), dict):
                    left += named.values()
            if isinstance(regex := part.get("pattern"), str):
                part["pattern"] = ascii_classes(regex)
            if isinstance(named := part.get("patternProperties"), dict):
                part["patternProperties"] = {ascii_classes(regex): value for regex, value in named.items()}
    return json.dumps(found)
