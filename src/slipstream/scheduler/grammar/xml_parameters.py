"""Arguments of a function as XML-like parameters, in the styles of several model families.

A parameter whose schema allows a string is plain text up to its end tag; any other one is JSON. Parameters come in the
order of the schema's properties.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.scheduler.grammar.lark_nodes import BadGrammar, LarkWriter, Node, escaped, unanchored


@dataclass(frozen=True)
class _Style:
    before: str  # the name
    after_text: tuple[str, ...]  # the name, where the value is plain text; whitespace may be between the texts
    after_json: tuple[str, ...]
    end: str  # of the value


def _dsml(begin: str, end: str) -> _Style:
    return _Style(f'{begin} name="', ('" string="true">',), ('" string="false">',), end)


STYLES = {
    "qwen_xml": _Style("<parameter=", (">",), (">",), "</parameter>"),
    "minimax_xml": _Style('<parameter name="', ('">',), ('">',), "</parameter>"),
    "deepseek_xml": _dsml("<｜DSML｜parameter", "</｜DSML｜parameter>"),
    "deepseek_v4_1_xml": _dsml("<｜DSML｜ parameter", "</｜DSML｜ parameter>"),
    "glm_xml": _Style("<arg_key>", ("</arg_key>", "<arg_value>"), ("</arg_key>", "<arg_value>"), "</arg_value>"),
}
_SPACE = r"[\x20\x0A\x0D\x09]{0,64}"
_NAME = "[a-zA-Z_][a-zA-Z0-9_]{0,127}"
_MAX_LENGTH = 2**16  # characters of a value
_MAX_REFERENCES = 16


class Texts(Protocol):
    """Makes nodes of fixed texts, in which special tokens are tokens."""

    writer: LarkWriter

    def fixed(self, text: str) -> Node: ...


class XmlParameters:
    def __init__(self, style: str, texts: Texts, of_json: Callable[[dict[str, Any]], Node]) -> None:
        """`of_json`: a node of a JSON schema."""
        self._style = STYLES[style]
        self._texts = texts
        self._of_json = of_json
        self._writer = texts.writer
        self._space = self._writer.pattern(_SPACE, is_nullable=True)

    def node(self, schema: Mapping[str, Any]) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("type", "object") != "object" or not isinstance(properties, dict) or "$ref" in schema:
            raise BadGrammar("the schema of XML parameters is an object with properties; wrap other schemas into one")
        if not isinstance(required, list) or not all(isinstance(each, str) and each in properties for each in required):
            raise BadGrammar(f"required of XML parameters is {required!r:.100}; give names of properties")
        nodes = []
        for name, inner in properties.items():
            one = self._parameter(self._texts.fixed(name), inner, schema)
            nodes.append(one if name in required else self._writer.repeat(one, 0, 1))
        others = schema.get("additionalProperties", not properties)
        if others is not False:
            one = self._parameter(self._writer.pattern(_NAME), others, schema)
            nodes.append(self._writer.repeat(one, 0, None))
        return self._writer.sequence([*nodes, self._space])

    def _parameter(self, name: Node, schema: object, root: Mapping[str, Any]) -> Node:
        style = self._style
        own = _resolved(schema, root)
        choices = [own["const"]] if "const" in own else own.get("enum")
        if isinstance(choices, list):
            is_text = all(isinstance(value, str) for value in choices)
            texts = [value if isinstance(value, str) else json.dumps(value) for value in choices]
            value = self._spaced(self._writer.choice([self._texts.fixed(text) for text in texts]))
        elif is_text := _allows_text(own, root):
            value = self._writer.closed(self._text(own))
        else:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            value = self._spaced(self._of_json({**shared, **own}))
        after: list[Node] = []
        for text in style.after_text if is_text else style.after_json:
            after += [self._space, self._texts.fixed(text)] if after else [self._texts.fixed(text)]
        before = [self._space, self._texts.fixed(style.before), name]
        return self._writer.sequence([*before, *after, value, self._texts.fixed(style.end)])

    def _spaced(self, value: Node) -> Node:
        return self._writer.sequence([self._space, value, self._space])

    def _text(self, schema: Mapping[str, Any]) -> Node:
        if schema.get("type") != "string":  # strings beside other types: their limits do not hold for those
            return self._writer.free_text([self._style.end])
        if "format" in schema:
            raise BadGrammar("format of a string is not supported in XML parameters; give a pattern, or remove it")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        pattern = schema.get("pattern")
        if pattern is not None:
            if least or most is not None:
                raise BadGrammar("pattern and length of a string together are not supported in XML parameters")
            if not isinstance(pattern, str):
                raise BadGrammar(f"pattern of a string is {pattern!r:.100}; give a string")
            return self._writer.pattern(escaped(unanchored(pattern)))
        for number in (least, most):
            if number is not None and not (isinstance(number, int) and 0 <= number <= _MAX_LENGTH):
                raise BadGrammar(f"the length of a string is {number!r:.100}; give a number up to {_MAX_LENGTH}")
        return self._writer.free_text([self._style.end], least, most)


def _resolved(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a property, without a reference at its top."""
    for _ in range(_MAX_REFERENCES):
        if isinstance(schema, bool) and schema:
            return {}
        if not isinstance(schema, dict):
            raise BadGrammar(f"the schema of a parameter is {schema!r:.100}; give an object")
        reference = schema.get("$ref")
        if reference is None:
            return schema
        found: object = root
        for key in reference.split("/")[1:] if isinstance(reference, str) and reference.startswith("#/") else [""]:
            found = found.get(key) if isinstance(found, dict) else None
        schema = found
    raise BadGrammar(f"references of a parameter's schema go on after {_MAX_REFERENCES} of them")


def _allows_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a string is valid."""
    types = schema.get("type")
    if types is not None:
        return "string" in (types if isinstance(types, list) else [types])
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            return any(_is_text_option(_resolved(option, root)) for option in options)
    return not schema.keys() & {"properties", "items", "allOf", "$ref"}


def _is_text_option(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type")
    return types is None or "string" in (types if isinstance(types, list) else [types])


# The fields of the formats of structural tags, and checks of their values. A wrong one raises BadGrammar.

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
