"""The fields of the formats of structural tags, and checks of their values. A wrong one raises BadGrammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.scheduler.grammar.lark_nodes import BadGrammar

FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order", "max_whitespace_cnt", "excludes"),
    "qwen_xml_parameter": ("json_schema",),
    "any_text": ("excludes", "max_tokens", "max_chars"),
    "grammar": ("grammar",),
    "regex": ("pattern",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("min", "max", "content"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "dispatch": ("rules", "loop", "excludes"),
    "token": ("token",),
}


def check_fields(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(str(name) for name in given.keys() - known):
        raise BadGrammar(f"{what} has no field {unknown[0]!r:.100}; remove it")


def text_of(given: Mapping[str, Any], name: str, what: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise BadGrammar(f"{name} of {what} is {value!r:.100}; give a string")
    return value


def texts_of(given: Mapping[str, Any], name: str, what: str, default: list[str] | None = None) -> list[str]:
    value = given.get(name, default)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise BadGrammar(f"{name} of {what} is {value!r:.100}; give a list of strings")
    return value


def list_of(given: Mapping[str, Any], name: str, what: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise BadGrammar(f"{name} of {what} is {value!r:.100}; give a list that is not empty")
    return value


def check_number(value: object, what: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadGrammar(f"{what} is {value!r:.100}; give a number from {least} to {most}")
    return value


def flag_of(given: Mapping[str, Any], name: str, what: str, *, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise BadGrammar(f"{name} of {what} is {value!r:.100}; give true or false")
    return value


def tag_flags(given: Mapping[str, Any], what: str) -> tuple[bool, bool]:
    return flag_of(given, "at_least_one", what, default=False), flag_of(given, "stop_after_first", what, default=False)
