"""Formats by the response template of a checkpoint: what transformers has in tokenizer_config.json since 5.17.

A template names the markers of each field of a message and how its text is read, by literals or by regular expressions.
One that means the markers of a known format is this format, which also reads what a model gets wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.literals import BracedFormat
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.parsers.tagged import TaggedFormat

T = TypeVar("T")
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")
_NAME = re.compile(r"(.*)\(\?P<name>[^()]*\)(.*)", re.DOTALL)
_TAG = re.compile(r"(.*)\(\?P<key>[^()]*\)(.*)\(\?P<value>[^()]*\)(.*)", re.DOTALL)
_OF_ITEM, _OF_CONTENT = re.compile(r"\{(\w+)\}"), re.compile(r"\{content\.(\w+)\}")
_SPECIAL = re.compile(r"(?<!\\)[][(){}*+?.^$|]|\\[a-zA-Z]")


def template_reasoning(
    template: object, known: Iterable[ReasoningFormat | HarmonyFormat]
) -> ReasoningFormat | HarmonyFormat | None:
    """None where the template has none, or has one that no format can read."""
    fields = _fields(template)
    thought = next((fields[name] for name in _THOUGHTS if name in fields), {})
    begin, end = _literals(thought, "open"), _literals(thought, "close")
    if not begin or not end:
        return None
    answer = _literals(fields.get("content", {}), "open")
    answer_end = _literals(fields.get("content", {}), "close") if answer else ()
    own = ReasoningFormat(begin, end, answer_begin=answer, answer_end=answer_end)
    return _known(own, known, ("begin", "end"))


def template_tools(template: object, known: Iterable[ToolCallFormat]) -> ToolCallFormat | None:
    """None where the template has none, or has one that no format can read."""
    calls = _fields(template).get("tool_calls", {})
    (end,) = ends if len(ends := _literals(calls, "close")) == 1 else ("",)
    given = calls.get("content_args")
    args: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    begin = _literals(calls, "open")
    if begin:
        return _envelope(begin, end, calls, known)
    pattern = _NAME.fullmatch(str(calls.get("open_pattern", "")))
    if pattern is None or not end:
        return None
    before, after = pattern[1], _literal(pattern[2])
    if calls.get("content") == "xml-inline" and (tag := _TAG.fullmatch(str(args.get("tag_pattern", "")))) is not None:
        section, _, function = before.rpartition(r"\s*")
        parts = [_literal(part) for part in (section, function, tag[1], *tag[2].split(r"\s*", 1)[:1])]
        value_end = _literal(tag[3].removeprefix(r"\s*"))
        if None in parts or after is None or value_end is None:
            return None
        own = TaggedFormat(
            parts[0] or "", end, (parts[1] or "", after), "", (parts[2] or "", parts[3] or ""), ("", value_end)
        )
        found = _known(own, known, ("begin", "end", "function", "key", "value"))
        return found if found is not own else None  # such a template does not name the end of a function
    prefix, delimiters = _literal(before), args.get("string_delims")
    match delimiters:
        case [[str(quote), str(other)]] if quote == other and prefix and not after:
            marker, _, rest = prefix.rpartition(">")
            own_braced = BracedFormat(f"{marker}>" if marker else "", end, quote, rest)
            return _known(own_braced, known, ("begin", "end", "quote", "prefix")) if marker else None
    return None


def _envelope(
    begin: tuple[str, ...], end: str, calls: Mapping[str, Any], known: Iterable[ToolCallFormat]
) -> ToolCallFormat | None:
    transform = calls.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if calls.get("content") != "json" or calls.get("content_args"):
        return None
    if function == "{content}":
        return _known(EnvelopeFormat(begin, end), known, ("begin", "end", "name_key", "arguments_key"))
    if not isinstance(function, Mapping):
        return None
    shape = _OF_ITEM if calls.get("transform_each") else _OF_CONTENT
    name, arguments = (shape.fullmatch(str(function.get(key))) for key in ("name", "arguments"))
    if name is None or arguments is None:
        return None
    own = EnvelopeFormat(begin, end, name_key=name[1], arguments_key=arguments[1])
    return _known(own, known, ("begin", "end", "name_key", "arguments_key"))


def _fields(template: object) -> Mapping[str, Mapping[str, Any]]:
    found = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    return {name: field for name, field in found.items() if isinstance(field, Mapping)}


def _literals(field: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The markers, without the whitespace around them, which no format keeps."""
    given = field.get(name)
    texts = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _literal(pattern: str) -> str | None:
    """The text that a regular expression without any choice matches; None for other ones."""
    return None if _SPECIAL.search(pattern) else re.sub(r"\\(.)", r"\1", pattern)


def _known(own: T, known: Iterable[Any], names: tuple[str, ...]) -> T:
    """The known format that has these fields, else this one."""
    assert dataclasses.is_dataclass(own)
    for format in known:
        if type(format) is type(own) and all(getattr(format, name) == getattr(own, name) for name in names):
            return format
    return own
