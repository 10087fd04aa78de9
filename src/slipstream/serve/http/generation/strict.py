"""Grammars of the output of a chat with tools or with a shape of the content: reasoning, then calls or the shape."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.params.structured import StructuredOutputsParams
from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.parsers.tagged import FixedCallFormat
from slipstream.scheduler.grammar.lark_nodes import nested
from slipstream.serve.http.generation.call_grammars import (
    TERMINALS,
    UNWRITTEN,
    calls_grammar,
    harmony_calls,
    harmony_prefix,
    symbol,
)
from slipstream.serve.http.generation.conversation import ChatConversation
from slipstream.serve.http.generation.fields import OUTPUT_FIELDS
from slipstream.serve.http.generation.tools import ChatFormats, Tools
from slipstream.serve.http.server.errors import bad_request
from slipstream.text.tokenizer import Tokenizer


def reasoning_prefix(
    format: ReasoningFormat | HarmonyFormat | None, tokenizer: Tokenizer, prompt: str, *, continues: bool
) -> str | None:
    """The grammar of the reasoning before a structure; None if the model cannot reason there."""
    if format is None:
        return None
    if isinstance(format, HarmonyFormat):
        return harmony_prefix(tokenizer)
    is_open = format.is_open(prompt, continues=continues)
    if not is_open and prompt.rstrip().endswith(format.end):
        return None  # the template has ended it
    begin = " | ".join(symbol(tokenizer, marker) for marker in format.begin)
    answer = " | ".join(symbol(tokenizer, marker) for marker in format.answer_begin)
    content = f"(({answer}) SPACE?)?" if answer else ""
    ends = [symbol(tokenizer, marker) for marker in format.end]
    lazy = "" if any(end.startswith("<[") for end in ends) else "[lazy]"
    return "\n".join(
        [
            f"start: thought SPACE? {content}" if is_open else f"start: (({begin}) thought SPACE?)? {content}",
            f"thought{lazy}: TEXT ({' | '.join(ends)})",
            TERMINALS,
        ]
    )


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
        fact = f"{field} and strict tools whose schemas have {UNWRITTEN} are not supported together"
        fact += " with this model's format of calls"
        raise bad_request(f"{fact}; set tool_choice to none or required, or remove one", field)
    if prefix is None or formats.is_harmony:
        return grammar
    return f"start: before calls\nbefore: {nested(prefix)}\ncalls: {nested(grammar)}"


def _grammar(tools: Tools, formats: ChatFormats, tokenizer: Tokenizer, *, alone: bool) -> str | None:
    strict = tools.strict
    schemas = {name: schema if name in strict else _ANY_OBJECT for name, schema in _schemas(tools).items()}
    format = HarmonyFormat() if formats.is_harmony else formats.tools
    return calls_grammar(format, tokenizer, schemas, alone=alone, reasoning=formats.reasoning)


def _strict(tools: Tools, formats: ChatFormats, tokenizer: Tokenizer) -> StructuredOutputsParams:
    """Free text in which calls of strict functions match their schema."""
    grammar = _grammar(tools, formats, tokenizer, alone=False)
    if grammar is None:
        index = next(index for index, tool in enumerate(tools.listed) if tool["function"].get("strict"))
        name = f"tools[{index}]{tools.path}.strict"
        fact = f"{name}: schemas with {UNWRITTEN} are not supported with this model's format of tool calls"
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
