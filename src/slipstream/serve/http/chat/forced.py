"""Tool calls that a request demands: their grammar, and how the output is read.

As in vLLM, the output is JSON: a list of objects with name and parameters (tool_choice required), or the parameters of
the function that the request names. A grammar makes it so, after the reasoning.
"""

from __future__ import annotations

from typing import Any

from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.fixed_call import FixedCallFormat
from slipstream.parsers.output_parser import ToolCallFormat
from slipstream.serve.http.chat.conversation import ChatConversation
from slipstream.serve.http.chat.tools import Tools
from slipstream.serve.http.errors import bad_request
from slipstream.structured_params import StructuredOutputsParams


def structured_outputs(conversation: ChatConversation) -> StructuredOutputsParams | None:
    """The shape of the output: that of the request, or one that demands calls."""
    given = conversation.params.structured_outputs
    if conversation.tools.are_forced:
        if given is not None:
            fact = "tool_choice demands a call, and another field a structured output"
            raise bad_request(f"{fact}; remove one", "tool_choice")
        given = StructuredOutputsParams(json=_schema(conversation.tools), lenient=not conversation.tools.strict)
    return given


def forced_format(tools: Tools) -> ToolCallFormat:
    return EnvelopeFormat(bare=True) if tools.function is None else FixedCallFormat(tools.function)


def _schema(tools: Tools) -> dict[str, Any]:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or _NO_PARAMETERS for tool in tools.listed}
    if tools.function is not None:
        return schemas[tools.function]
    calls, definitions = [], {}
    for place, (name, schema) in enumerate(schemas.items()):
        definitions[f"tool{place}"] = _moved(schema, f"#/$defs/tool{place}")
        properties = {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{place}"}}
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


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself changed for another place in a larger schema."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
