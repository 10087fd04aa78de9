"""Translates StructuredOutputsParams to a grammar of llguidance. Pure functions of text; nothing is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.structured_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# bounded, since some models write line breaks without end where they are allowed
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_FREE_TEXT = r"/(.|\n)*/"
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_ONES = ("items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")


class BadGrammar(ValueError):
    """The specification cannot be translated."""


def translate(params: StructuredOutputsParams, special_texts: frozenset[str]) -> str:
    """A grammar for llguidance's matcher. `special_texts`: the special tokens of the tokenizer."""
    from llguidance import LLMatcher

    if params.prefix is not None:
        body = _rule_body(params, special_texts)
        return LLMatcher.grammar_from_lark(f"start: before body\nbefore: {_nested(params.prefix)}\nbody: {body}\n")
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + _choices(params.choice))
    if params.grammar is not None or params.structural_tag is not None:
        return LLMatcher.grammar_from_lark(_lark(params, special_texts))
    return LLMatcher.grammar_from_json_schema(json.dumps(json_schema(params)), overrides=_json_options(params))


def _rule_body(params: StructuredOutputsParams, special_texts: frozenset[str]) -> str:
    """The structure as the body of a rule in Lark's syntax."""
    if params.regex is not None:
        pattern = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), params.regex)
        return f"/{pattern}/"
    if params.choice is not None:
        return _choices(params.choice)
    if params.grammar is not None or params.structural_tag is not None:
        return _nested(_lark(params, special_texts))
    return "%json " + json.dumps({**json_schema(params), "x-guidance": _json_options(params)})


def _nested(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


def _choices(choice: Sequence[str]) -> str:
    return " | ".join(map(_quoted, choice))


def _lark(params: StructuredOutputsParams, special_texts: frozenset[str]) -> str:
    """A grammar or a structural tag in Lark's syntax."""
    from llguidance.gbnf_to_lark import any_to_lark

    if params.grammar is not None:
        try:
            return any_to_lark(params.grammar)
        except Exception as error:  # the converter from GBNF raises plain exceptions
            raise BadGrammar(f"the grammar cannot be read: {error}") from None
    assert params.structural_tag is not None
    tag = _read(params.structural_tag)
    assert isinstance(tag, dict), "checked when the parameters were built"
    return _tag_grammar(tag, special_texts)


def json_schema(params: StructuredOutputsParams) -> dict[str, Any]:
    """The schema of the output, which is JSON."""
    schema: object = {"type": "object"} if params.json is None else _read(params.json)
    if schema is False:
        raise BadGrammar("no JSON matches the schema false")
    closed = _closed(schema) if params.disable_additional_properties else schema
    return closed if isinstance(closed, dict) else {}


def _read(text: object) -> dict[str, Any] | bool:
    assert isinstance(text, str), "made a text when the parameters were built"
    read: dict[str, Any] | bool = json.loads(text)
    return read


def _json_options(params: StructuredOutputsParams) -> JsonCompileOptions:
    # oneOf is read as anyOf: that no second alternative matches cannot be enforced token by token
    options: JsonCompileOptions = {"coerce_one_of": True}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    if params.lenient:
        options["lenient"] = True
    return options


def _closed(schema: object) -> object:
    """The schema with additionalProperties false for every object that lists properties and does not mention them."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in _SCHEMA_LISTS:
        if isinstance(inner := closed.get(name), list):
            closed[name] = [_closed(each) for each in inner]
    for name in _SCHEMA_MAPS:
        if isinstance(inner := closed.get(name), dict):
            closed[name] = {key: _closed(each) for key, each in inner.items()}
    for name in _SCHEMA_ONES:
        if isinstance(inner := closed.get(name), dict):
            closed[name] = _closed(inner)
    if ("properties" in closed or closed.get("type") == "object") and not closed.keys() & {
        "additionalProperties", "unevaluatedProperties", "patternProperties",
    }:  # fmt: skip
        closed["additionalProperties"] = False
    return closed


def _tag_grammar(tag: dict[str, Any], special_texts: frozenset[str]) -> str:
    """A Lark grammar of free text in which a trigger begins one of the structures."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if tag.get("type", "structural_tag") != "structural_tag" or not isinstance(structures, list) or not structures:
        raise BadGrammar("a structural tag has structures, a list of objects with begin, schema and end, and triggers")
    if not isinstance(triggers, list) or not all(isinstance(text, str) and text for text in triggers):
        raise BadGrammar("triggers of a structural tag is a list of strings")
    rules, names = [], []
    for index, each in enumerate(structures):
        if not isinstance(each, dict) or not all(isinstance(each.get(name), str) for name in ("begin", "end")):
            raise BadGrammar("a structure has begin and end, which are strings, and schema")
        begin, name = each["begin"], f"tag_{index}"
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise BadGrammar(f"no trigger begins the structure that starts with {begin!r}")
        rest = " ".join(
            filter(None, (_quoted_or_none(begin[len(trigger) :]), _schema(each), _quoted_or_none(each["end"])))
        )
        names.append(name)
        if trigger in special_texts:  # one token, which is not part of any text
            rules.append(f"{name}: TEXT {trigger} {rest}")
        else:
            rules += [f"{name}_trigger[lazy]: TEXT {_quoted(trigger)}", f"{name}: {name}_trigger {rest}"]
    return "\n".join([f"start: ({' | '.join(names)})* last", "last: TEXT", f"TEXT: {_FREE_TEXT}", *rules]) + "\n"


def _schema(structure: dict[str, Any]) -> str:
    schema = structure.get("schema", {"type": "object"})
    if not isinstance(schema, dict | bool):
        raise BadGrammar("schema of a structure is an object")
    return "%json " + json.dumps(schema)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _quoted_or_none(text: str) -> str | None:
    return _quoted(text) if text else None
