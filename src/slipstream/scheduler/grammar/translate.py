"""Translates StructuredOutputsParams to a grammar of llguidance. Pure functions of text; nothing is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.lark_nodes import BadGrammar, as_lark, ascii_classes, ascii_patterns, escaped, nested
from slipstream.scheduler.grammar.structural_tag import tag_grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# bounded, since some models write line breaks without end where they are allowed
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_ONES = ("items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")


def translate(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """A grammar for llguidance's matcher. `special_tokens`: ids by text."""
    from llguidance import LLMatcher

    if params.prefix is not None or params.alternative is not None:
        return LLMatcher.grammar_from_lark(_with_context(params, _rule_body(params, special_tokens)))
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(ascii_classes(params.regex))
    if params.choice is not None:
        return LLMatcher.grammar_from_lark(_choices(params.choice))
    if params.grammar is not None or params.structural_tag is not None:
        return LLMatcher.grammar_from_lark(_lark(params, special_tokens))
    schema = ascii_patterns(json.dumps(json_schema(params)))
    return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(params))


def _with_context(params: StructuredOutputsParams, body: str) -> str:
    """A grammar in Lark's syntax: the prefix and the body, or the alternative."""
    rules = [f"body: {body}"]
    start = "body"
    if params.prefix is not None:
        start = "before body"
        rules.append(f"before: {nested(params.prefix)}")
    if params.alternative is not None:
        start += " | other"
        rules.append(f"other: {nested(params.alternative)}")
    return "\n".join([f"start: {start}", *rules, ""])


def _rule_body(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """The structure as the body of a rule in Lark's syntax."""
    if params.regex is not None:
        return f"/{escaped(params.regex)}/"
    if params.choice is not None:
        return nested(_choices(params.choice))
    if params.grammar is not None or params.structural_tag is not None:
        return nested(_lark(params, special_tokens))
    return _json_rule(_json_options(params), json_schema(params))


def _choices(choice: Sequence[str]) -> str:
    """A grammar with one terminal: as a rule, more than 2,000 alternatives are too many for the parser."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, choice))


def _lark(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """A grammar or a structural tag in Lark's syntax."""
    if params.grammar is not None:
        return as_lark(params.grammar)
    assert params.structural_tag is not None
    tag = _read(params.structural_tag)
    assert isinstance(tag, dict), "checked when the parameters were built"
    return tag_grammar(tag, special_tokens, partial(_json_rule, _json_options(params)))


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


def json_rule(schema: Mapping[str, Any]) -> str:
    """The body of a rule of JSON with the options of a request that gives none."""
    return _json_rule(_json_options(StructuredOutputsParams(json_object=True)), schema)


def _json_rule(options: JsonCompileOptions, schema: Mapping[str, Any], whitespace: str | None = None) -> str:
    """The body of a rule of JSON. `whitespace`: a pattern for it instead of that of the options."""
    own = options if whitespace is None else {**options, "whitespace_pattern": whitespace}
    return "%json " + ascii_patterns(json.dumps({**schema, "x-guidance": own}))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
