"""Grammars of calls in the model's own format, for tools that the model may call: of free text with calls, where a tool
is strict, and of calls alone, where the content has a shape (`response_format`).

Arguments of functions with `strict` match their schema; those of other functions are any JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.params.structured import StructuredOutputsParams
from slipstream.parsers.envelope import EnvelopeFormat, MistralFormat, NamedFormat
from slipstream.parsers.output_parser import Functions, HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.parsers.tagged import FixedCallFormat, TaggedFormat
from slipstream.scheduler.grammar.lark_nodes import nested
from slipstream.scheduler.grammar.translate import json_rule
from slipstream.serve.http.generation.conversation import ChatConversation
from slipstream.serve.http.generation.fields import OUTPUT_FIELDS
from slipstream.serve.http.generation.tools import ChatFormats, Tools
from slipstream.serve.http.server.errors import bad_request
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


# Grammars in Lark's syntax of what comes before a structure: reasoning, and the headers of gpt-oss's messages.

TERMINALS = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{1,8}/"


def symbol(tokenizer: Tokenizer, text: str) -> str:
    """A marker in a grammar: a special token is no text, so it is written by its id."""
    token = tokenizer.backend.token_to_id(text)
    return f"<[{token}]>" if token is not None and tokenizer.is_special(token) else quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def reasoning_prefix(
    format: ReasoningFormat | HarmonyFormat | None, tokenizer: Tokenizer, prompt: str, *, continues: bool
) -> str | None:
    """The grammar of the reasoning before a structure; None if the model cannot reason there."""
    if format is None:
        return None
    if isinstance(format, HarmonyFormat):
        return _harmony_analysis(tokenizer) + "\n" + f"start: analysis* {_header(tokenizer, 'final')}"
    is_open = format.is_open(prompt, continues=continues)
    if not is_open and prompt.rstrip().endswith(format.end):
        return None  # the template has ended it
    begin = " | ".join(symbol(tokenizer, marker) for marker in format.begin)
    ends = [symbol(tokenizer, marker) for marker in format.end]
    lazy = "" if any(end.startswith("<[") for end in ends) else "[lazy]"
    return "\n".join(
        [
            "start: thought SPACE?" if is_open else f"start: (({begin}) thought SPACE?)?",
            f"thought{lazy}: TEXT ({' | '.join(ends)})",
            TERMINALS,
        ]
    )


def harmony_calls(tokenizer: Tokenizer, schemas: Mapping[str, Any]) -> str:
    """The grammar of an output of gpt-oss that calls one of the functions, after any reasoning."""
    calls, rules = _harmony_rules(tokenizer, schemas)
    return "\n".join([f"start: analysis* ({calls})", *rules, _harmony_analysis(tokenizer)])


def harmony_messages(tokenizer: Tokenizer, schemas: Mapping[str, Any]) -> str:
    """The grammar of any messages of gpt-oss, of which the last may call one of the functions."""
    calls, rules = _harmony_rules(tokenizer, schemas)
    channels = (_header(tokenizer, channel) for channel in ("analysis", "commentary", "final"))
    end, start = symbol(tokenizer, "<|end|>"), symbol(tokenizer, "<|start|>")
    lazy = "" if end.startswith("<[") else "[lazy]"
    return "\n".join(
        [
            f'start: (header thought {start} "assistant")* (header TEXT | {calls})',
            f"header: {' | '.join(channels)}",
            f"thought{lazy}: TEXT {end}",
            *rules,
            TERMINALS,
        ]
    )


def _harmony_rules(tokenizer: Tokenizer, schemas: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The alternatives of calls, and their rules."""
    constrain = symbol(tokenizer, "<|constrain|>") + ' "json"'
    headers = {name: _header(tokenizer, f"commentary to=functions.{name} ", constrain) for name in schemas}
    bodies = [f"{headers[name]} {json_rule(schema)}" for name, schema in schemas.items()]
    rules = [f"call{index}: {body}" for index, body in enumerate(bodies)]
    return " | ".join(f"call{index}" for index in range(len(rules))), rules


def _harmony_analysis(tokenizer: Tokenizer) -> str:
    end, start = symbol(tokenizer, "<|end|>"), symbol(tokenizer, "<|start|>")
    lazy = "" if end.startswith("<[") else "[lazy]"
    header = _header(tokenizer, "analysis")
    return "\n".join([f'analysis: {header} thought {start} "assistant"', f"thought{lazy}: TEXT {end}", TERMINALS])


def _header(tokenizer: Tokenizer, text: str, more: str = "") -> str:
    return f"{symbol(tokenizer, '<|channel|>')} {quoted(text)} {more} {symbol(tokenizer, '<|message|>')}"


# Tool calls that a request demands: their grammar, and how the output is read.
#
# As in vLLM, the output is JSON: a list of objects with name and parameters (tool_choice required), or the parameters
# of the function that the request names. A grammar makes it so, after the reasoning.
#
# A shape of the content (`response_format`, and its names in other APIs) leaves calls alone, as in OpenAI's API: an
# answer with a demanded call has no content, and where the model decides it either calls or answers in the shape. A
# shape of the output (vLLM's `structured_outputs`, structural tags) has no calls besides.


def structured_outputs(
    conversation: ChatConversation, formats: ChatFormats, prompt: str, field: str
) -> StructuredOutputsParams | None:
    """The shape of the output, that of the request or one that demands calls, after any reasoning. `field`: the field
    with the shape."""
    given, tools, tokenizer = conversation.params.structured_outputs, conversation.tools, conversation.model.tokenizer
    assert tokenizer is not None, "a chat template needs a tokenizer"
    of_content = given is not None and given.structural_tag is None and field not in OUTPUT_FIELDS
    if tools.are_forced:
        if given is not None and not of_content:
            fact = "tool_choice demands a call, and another field a structured output"
            raise bad_request(f"{fact}; remove one", "tool_choice")
        if formats.is_harmony:
            wanted = {name: schema for name, schema in _schemas(tools).items() if tools.function in (None, name)}
            return StructuredOutputsParams(grammar=harmony_calls(tokenizer, wanted))
        given = StructuredOutputsParams(json=_schema(tools), lenient=not tools.strict, whitespace_pattern=" ")
    elif tools.strict and given is None:
        given = _strict(tools, formats, tokenizer)
        if formats.is_harmony:
            return given
    if given is None or given.prefix is not None:
        return given
    prefix = reasoning_prefix(formats.reasoning, tokenizer, prompt, continues=conversation.continue_final_message)
    calls = None
    if of_content and not tools.are_forced and tools.shown:
        calls = _calls_alone(tools, formats, tokenizer, prefix, field)
    if prefix is None and calls is None:
        return given
    return msgspec.structs.replace(given, prefix=prefix, alternative=calls)


def _calls_alone(tools: Tools, formats: ChatFormats, tokenizer: Tokenizer, prefix: str | None, field: str) -> str:
    """The grammar of calls instead of content, after any reasoning."""
    grammar = _grammar(tools, formats, tokenizer, alone=True)
    if grammar is None:
        fact = f"{field} and tools that the model may call are not supported together with this model's format of calls"
        raise bad_request(f"{fact}; set tool_choice to none or required, or remove one", field)
    if prefix is None or formats.is_harmony:
        return grammar
    return f"start: before calls\nbefore: {nested(prefix)}\ncalls: {nested(grammar)}"


def _grammar(tools: Tools, formats: ChatFormats, tokenizer: Tokenizer, *, alone: bool) -> str | None:
    strict = tools.strict
    schemas = {name: schema if name in strict else _ANY_OBJECT for name, schema in _schemas(tools).items()}
    format = HarmonyFormat() if formats.is_harmony else formats.tools
    return calls_grammar(format, tokenizer, schemas, alone=alone)


def _strict(tools: Tools, formats: ChatFormats, tokenizer: Tokenizer) -> StructuredOutputsParams:
    """Free text in which calls of strict functions match their schema."""
    grammar = _grammar(tools, formats, tokenizer, alone=False)
    if grammar is None:
        index = next(index for index, tool in enumerate(tools.listed) if tool["function"].get("strict"))
        name = f"tools[{index}]{tools.path}.strict"
        fact = f"{name} is not supported with this model's format of tool calls"
        raise bad_request(f"{fact}; remove it, or set tool_choice to required or to a function", name)
    return StructuredOutputsParams(grammar=grammar)


def forced_format(tools: Tools) -> ToolCallFormat:
    return EnvelopeFormat(bare=True, only_calls=True) if tools.function is None else FixedCallFormat(tools.function)


def _schemas(tools: Tools) -> dict[str, dict[str, Any]]:
    """The parameters of each function."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or _NO_PARAMETERS for tool in tools.listed}


def _schema(tools: Tools) -> dict[str, Any]:
    schemas = _schemas(tools)
    if tools.function is not None:
        return schemas[tools.function]
    calls, definitions = [], {}
    for index, (name, schema) in enumerate(schemas.items()):
        definitions[f"tool{index}"] = _moved(schema, f"#/$defs/tool{index}")
        properties = {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{index}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if tools.parallel else {**schema, "maxItems": 1}


_ANY_OBJECT = {"type": "object"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def _moved(schema: Any, path: str) -> Any:
    """The schema with its references to itself changed for its path in a larger schema."""
    if isinstance(schema, list):
        return [_moved(each, path) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, path) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = path + reference[1:]
    return moved
