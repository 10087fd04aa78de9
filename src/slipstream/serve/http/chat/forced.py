"""Tool calls that a request demands: their grammar, and how the output is read.

As in vLLM, the output is JSON: a list of objects with name and parameters (tool_choice required), or the parameters of
the function that the request names. A grammar makes it so, after the reasoning.
"""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.fixed_call import FixedCallFormat
from slipstream.parsers.harmony import HarmonyFormat
from slipstream.parsers.output_parser import ToolCallFormat
from slipstream.serve.http.chat.conversation import ChatConversation
from slipstream.serve.http.chat.formats import ChatFormats
from slipstream.serve.http.chat.grammar import harmony_calls, reasoning_prefix
from slipstream.serve.http.chat.strict import calls_grammar
from slipstream.serve.http.chat.tools import Tools
from slipstream.serve.http.errors import bad_request
from slipstream.structured_params import StructuredOutputsParams
from slipstream.text.tokenizer import Tokenizer


def structured_outputs(
    conversation: ChatConversation, formats: ChatFormats, prompt: str
) -> StructuredOutputsParams | None:
    """The shape of the output, that of the request or one that demands calls, after any reasoning."""
    given, tools, tokenizer = conversation.params.structured_outputs, conversation.tools, conversation.model.tokenizer
    assert tokenizer is not None, "a chat template needs a tokenizer"
    if tools.are_forced:
        if given is not None:
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
    return given if prefix is None else msgspec.structs.replace(given, prefix=prefix)


def _strict(tools: Tools, formats: ChatFormats, tokenizer: Tokenizer) -> StructuredOutputsParams:
    """Free text in which calls of strict functions match their schema."""
    strict = tools.strict
    schemas = {name: schema if name in strict else _ANY_OBJECT for name, schema in _schemas(tools).items()}
    grammar = calls_grammar(HarmonyFormat() if formats.is_harmony else formats.tools, tokenizer, schemas)
    if grammar is None:
        index = next(index for index, tool in enumerate(tools.listed) if tool["function"].get("strict"))
        name = f"tools[{index}].function.strict"
        fact = f"{name} is not supported with this model's format of tool calls"
        raise bad_request(f"{fact}; remove it, or set tool_choice to required or to a function", name)
    return StructuredOutputsParams(grammar=grammar)


def forced_format(tools: Tools) -> ToolCallFormat:
    return EnvelopeFormat(bare=True) if tools.function is None else FixedCallFormat(tools.function)


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
