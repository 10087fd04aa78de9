"""Grammars of calls in the model's own format, for tools that the model may call: of free text with calls, where a tool
is strict, and of calls alone, where the content has a shape (`response_format`).

Arguments of functions with `strict` match their schema; those of other functions are any JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.parsers.envelope import EnvelopeFormat, MistralFormat, NamedFormat
from slipstream.parsers.output_parser import Functions, HarmonyFormat, ToolCallFormat
from slipstream.parsers.tagged import TaggedFormat
from slipstream.scheduler.grammar.translate import json_rule
from slipstream.serve.http.chat.grammar import TERMINALS, harmony_calls, harmony_messages, quoted, symbol
from slipstream.text.tokenizer import Tokenizer

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each function."""


def calls_grammar(
    format: ToolCallFormat | None, tokenizer: Tokenizer, schemas: Schemas, *, alone: bool = False
) -> str | None:
    """The grammar in Lark's syntax; None for a format that it cannot describe. `alone`: at least one call, and no text
    beside the calls, but for the reasoning of gpt-oss."""
    if isinstance(format, HarmonyFormat):
        return harmony_calls(tokenizer, schemas) if alone else harmony_messages(tokenizer, schemas)
    if isinstance(format, EnvelopeFormat):
        rules, begin = _envelope(format, tokenizer, schemas), format.begin
    elif isinstance(format, MistralFormat):
        rules, begin = _mistral(tokenizer, schemas), (format.begin,)
    elif isinstance(format, NamedFormat):
        rules, begin = _named(format, tokenizer, schemas), (format.section[0],)
    elif isinstance(format, TaggedFormat):
        rules, begin = _tagged(format, tokenizer, schemas), (format.begin,)
    else:
        return None
    marks = [symbol(tokenizer, marker) for marker in begin]
    if isinstance(format, EnvelopeFormat) and format.bare:  # an answer that begins with a bracket is a call
        if alone:
            return "\n".join([f"start: ({marks[0]})? SPACE? calls", *rules, TERMINALS])
        other = "{ \\n" if marks[0].startswith("<[") else "{ \\n<"
        return "\n".join(
            [f"start: ({marks[0]})? SPACE? calls | last", f"last: /[^{other}](.|\\n)*/", *rules, TERMINALS]
        )
    if alone:
        return "\n".join(["start: (SPACE? mark calls)+ SPACE?", f"mark: {' | '.join(marks)}", *rules, TERMINALS])
    triggers = [
        f"trigger{index}{'' if mark.startswith('<[') else '[lazy]'}: TEXT {mark}" for index, mark in enumerate(marks)
    ]
    any_trigger = " | ".join(f"trigger{index}" for index in range(len(marks)))
    return "\n".join([f"start: (({any_trigger}) calls)* last", "last: TEXT", *triggers, *rules, TERMINALS])


def _objects(schemas: Schemas, key: str = "arguments") -> list[str]:
    return [
        f"call{index}: {json_rule(_object(name, key, schema))}" for index, (name, schema) in enumerate(schemas.items())
    ]


def _envelope(format: EnvelopeFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    if format.bare:
        rules = _objects(schemas, "parameters")
        return ['calls: call (SPACE? ";" SPACE? call)*', f"call: {_any(len(rules))}", *rules]
    rules = _objects(schemas)
    end = f" SPACE? {symbol(tokenizer, format.end)}" if format.end else ""
    items = 'call | "[" SPACE? call (SPACE? "," SPACE? call)* SPACE? "]"'
    return [f"calls: SPACE? ({items}){end}", f"call: {_any(len(rules))}", *rules]


def _mistral(tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    """Both forms: a list of objects, or a name and its arguments."""
    rules = _objects(schemas)
    mark = symbol(tokenizer, "[ARGS]")
    named = [
        f"named{index}: {quoted(name)} {mark}? {json_rule(schema)}"
        for index, (name, schema) in enumerate(schemas.items())
    ]
    any_named = " | ".join(f"named{index}" for index in range(len(named)))
    items = '"[" SPACE? call (SPACE? "," SPACE? call)* SPACE? "]"'
    return [f"calls: SPACE? ({items} | {any_named})", f"call: {_any(len(rules))}", *rules, *named]


def _named(format: NamedFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    begin, separator, end = (symbol(tokenizer, text) for text in (format.begin, format.separator, format.end))
    before = f'"function" {symbol(tokenizer, format.before_name)} ' if format.before_name else ""
    after = f" SPACE? {quoted(format.after_arguments)}" if format.after_arguments else ""
    rules = []
    for index, (name, schema) in enumerate(schemas.items()):
        shown = f"{quoted(f'functions.{name}:')} /[0-9]{{1,4}}/" if format.name_is_id else quoted(name)
        rules.append(f"call{index}: {shown} {separator} {json_rule(schema)}{after} {end}")
    section = symbol(tokenizer, format.section[1])
    return [f"calls: (SPACE? {begin} {before}({_any(len(rules))}))+ SPACE? {section}", *rules]


def _tagged(format: TaggedFormat, tokenizer: Tokenizer, schemas: Schemas) -> list[str]:
    rules = [f"calls: SPACE? ({_any(len(schemas))}) SPACE? {symbol(tokenizer, format.end)}"]
    functions = Functions(schemas)
    for index, (name, schema) in enumerate(schemas.items()):
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        parts = []
        for number, (key, inner) in enumerate(properties.items()):
            rule = f"value{index}x{number}"
            types = functions.types_of(name, key)
            is_text = not types or "string" in types
            rules.append(_value(format, rule, inner, is_text=is_text, root=schema))
            part = f"SPACE? {quoted(format.key[0] + key + format.key[1])} {rule}"
            parts.append(part if key in required else f"({part})?")
        prefix = quoted(format.function[0] + name + (format.function[1] if format.function[0] else ""))
        tail = f" SPACE? {quoted(format.function_end)}" if format.function_end else ""
        rules.append(f"call{index}: {prefix} {' '.join(parts)}{tail}")
    return rules


def _value(
    format: TaggedFormat, rule: str, schema: Mapping[str, Any], *, is_text: bool, root: Mapping[str, Any]
) -> str:
    """The rule of a value and its end tag."""
    line = "\n" if format.trims_lines else ""
    begin = f"SPACE? {quoted(format.value[0])} " if format.value[0] else f"{quoted(line)} " if line else ""
    end = quoted(line + format.value[1])
    choices = schema.get("enum")
    if isinstance(choices, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in choices]
        return f"{rule}: {begin}({' | '.join(map(quoted, texts))}) {end}"
    if is_text:
        return f"{rule}: {begin}{rule}_text\n{rule}_text[lazy]: TEXT {end}"
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return f"{rule}: {begin}{json_rule({**schema, **definitions})} {end}"


def _any(count: int) -> str:
    return " | ".join(f"call{index}" for index in range(count))


def _object(name: str, key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call. Definitions of the arguments are its own, where references look for them."""
    arguments = dict(schema)
    definitions: dict[str, Any] = {name: arguments.pop(name) for name in ("$defs", "definitions") if name in arguments}
    properties = {"name": {"const": name}, key: arguments}
    shape = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {**shape, **definitions}
