"""Checks the tools of a chat request, and which of them the model must, may or may not call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.front.served import ServedModel
from slipstream.params.structured import StructuredOutputsParams
from slipstream.parsers.families import (
    NO_PARSER,
    detect_reasoning,
    detect_tools,
    reasoning_format,
    tool_call_format,
)
from slipstream.parsers.output_parser import Functions, HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.serve.http.generation.fields import check_fields
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer

_NAME = re.compile(r"[\w.\-]{1,128}")
_FIELDS = {"name", "description", "parameters", "strict"}
_ALLOWED = '{"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}]}'
_CHOICES = 'give "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'


class Tools(msgspec.Struct, frozen=True):
    """The tools of one request, in the format of OpenAI's chat API."""

    listed: list[dict[str, Any]] = []
    choice: Literal["auto", "none", "required", "function"] = "auto"
    function: str | None = None  # the only one to call, with the choice "function"
    parallel: bool = True  # several calls in one answer
    path: str = ".function"  # of a function in a tool of the request

    @classmethod
    def check(
        cls,
        tools: list[Any] | None,
        choice: str | dict[str, Any] | None,
        parallel: bool | None,
        *,
        schema: str | None = None,
    ) -> Tools:
        """Raises with the name of a wrong field. `schema`: the name of `parameters` in an API whose tools are functions
        and have none."""
        inner, schema = (".function", "parameters") if schema is None else ("", schema)
        listed = [_check_tool(tool, f"tools[{index}]", inner, schema) for index, tool in enumerate(tools or [])]
        names = [tool["function"]["name"] for tool in listed]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise bad_request(f"tools has the function {name!r} twice; rename one", f"tools[{index}]{inner}.name")
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            choice, allowed = _check_allowed(choice, names)
            listed = [tool for tool in listed if tool["function"]["name"] in allowed]
        kind, function = _check_choice(choice, names)
        if parallel is False and not listed:
            name = "parallel_tool_calls"
            raise bad_request(f"{name} needs tools; give some, or remove this", name)
        return cls(listed, kind, function, parallel is not False, inner)

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools that the prompt has. A model that may call none does not know of them."""
        return [] if self.choice == "none" else self.listed

    @property
    def functions(self) -> Functions:
        return Functions.of_tools(self.shown)

    @property
    def are_forced(self) -> bool:
        return self.choice in ("required", "function")

    @property
    def strict(self) -> list[str]:
        """Functions whose arguments must match their schema."""
        return [tool["function"]["name"] for tool in self.shown if tool["function"].get("strict")]


def _check_tool(tool: Any, path: str, inner: str, schema: str) -> dict[str, Any]:
    """`inner`: the path of the function in the tool; `schema`: its field with the parameters."""
    shape = 'give {"type": "function", "function": {"name": ..., "parameters": ...}}'
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        kind = tool.get("type") if isinstance(tool, dict) else None
        fact = f"is of type {kind!r}, which is not supported" if kind not in (None, "function") else "is no function"
        raise bad_request(f"{path} {fact}; {shape}", path)
    if tool.get("type", "function") != "function":
        raise bad_request(f"{path}.type is {tool['type']!r:.100}; {shape}", f"{path}.type")
    if unknown := tool.keys() - {"type", "function"}:
        raise bad_request(f"there is no field {path}.{min(unknown)}; remove it", f"{path}.{min(unknown)}")
    function, path = tool["function"], f"{path}{inner}"
    if unknown := function.keys() - _FIELDS:
        raise bad_request(f"there is no field {path}.{min(unknown)}; remove it", f"{path}.{min(unknown)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fact = f"{path}.name is {name!r:.100}; give 1 to 128 letters, digits, underscores, dashes or dots"
        raise bad_request(fact, f"{path}.name")
    if not isinstance(function.get("description", ""), str | None):
        raise bad_request(f"{path}.description is no text; give a string", f"{path}.description")
    if not isinstance(parameters := function.get("parameters") or {}, dict):
        raise bad_request(f"{path}.{schema} is no JSON schema; give an object", f"{path}.{schema}")
    try:
        StructuredOutputsParams(json=parameters)  # checks size and depth
    except InvalidParams as error:
        fact = str(error).removeprefix("structured_outputs: json ")
        raise bad_request(f"{path}.{schema} {fact}", f"{path}.{schema}") from None
    if function.get("strict") not in (None, True, False):
        raise bad_request(f"{path}.strict is {function['strict']!r:.100}; give true or false", f"{path}.strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _check_choice(choice: str | dict[str, Any] | None, names: list[str]) -> tuple[Any, str | None]:
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "required" and not names:
            raise bad_request("tool_choice demands a call, and there are no tools; give tools", "tool_choice")
        return choice or "auto", None
    return "function", _check_named(choice, names, _CHOICES)


def _check_named(choice: Any, names: list[str], hint: str) -> str:
    """The name of the function that `choice`, or a part of it, refers to."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise bad_request(f"tool_choice is {choice!r:.200}; {hint}", "tool_choice")
    assert isinstance(function, Mapping)
    check_fields(choice, "tool_choice", ("type", "function"))
    check_fields(function, "tool_choice.function", ("name",))
    if name not in names:
        fact = f"tool_choice names {name!r:.100}"
        raise bad_request(f"{fact}, and tools has {', '.join(names) or 'no function'}", "tool_choice")
    return name


def _check_allowed(choice: Mapping[str, Any], names: list[str]) -> tuple[str, list[str]]:
    """The choice between the allowed functions, and their names."""
    check_fields(choice, "tool_choice", ("type", "allowed_tools"))
    allowed, hint = choice.get("allowed_tools"), f"give allowed_tools: {_ALLOWED}"
    if not isinstance(allowed, Mapping) or not isinstance(some := allowed.get("tools"), list) or not some:
        raise bad_request(f"tool_choice is {choice!r:.200}; {hint}", "tool_choice")
    check_fields(allowed, "tool_choice.allowed_tools", ("mode", "tools"))
    if (mode := allowed.get("mode")) not in ("auto", "required"):
        raise bad_request(f"the mode of tool_choice is {mode!r:.100}; give auto or required", "tool_choice")
    return mode, [_check_named(each, names, hint) for each in some]


# ChatFormats: how a model writes reasoning and tool calls, by the server's options or the model's chat template.

GENERIC = "hermes"  # the format that a model without one is asked to use


class ChatFormats(msgspec.Struct, frozen=True):
    reasoning: ReasoningFormat | HarmonyFormat | None
    tools: ToolCallFormat | None
    has_short_ids: bool = False  # the template takes ids of calls with 9 characters only

    @classmethod
    def of(cls, served: ServedModel, settings: ServerSettings) -> ChatFormats:
        tokenizer = served.tokenizer
        if tokenizer is None:
            return cls(None, None)
        templates = tokenizer.chat_template(with_tools=True), tokenizer.chat_template()
        return _formats(templates, settings.tool_call_parser, settings.reasoning_parser)

    @property
    def is_harmony(self) -> bool:
        """Whether reasoning, content and calls are messages of gpt-oss's format."""
        return isinstance(self.reasoning, HarmonyFormat) or isinstance(self.tools, HarmonyFormat)

    def uses_special_tokens(self, tokenizer: Tokenizer, *, with_tools: bool) -> bool:
        """Whether a marker is a special token, which is not part of the text by default."""
        formats = (self.reasoning, self.tools if with_tools else None)
        markers = {marker for one in formats if one is not None for marker in _markers(one)}
        return not markers.isdisjoint(_special_texts(tokenizer))


@lru_cache(maxsize=64)
def _formats(templates: tuple[str | None, str | None], tools: str | None, reasoning: str | None) -> ChatFormats:
    tools = (detect_tools(templates[0]) or GENERIC) if tools is None else tools
    reasoning = detect_reasoning(templates[1]) if reasoning is None else reasoning
    return ChatFormats(
        None if reasoning in (None, NO_PARSER) else reasoning_format(reasoning),
        None if tools in (None, NO_PARSER) else tool_call_format(tools),
        has_short_ids=tools == "mistral",
    )


@lru_cache(maxsize=16)
def _special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    return frozenset(text for token in tokenizer.special_ids if (text := tokenizer.piece(token)) is not None)


def _markers(format: object) -> frozenset[str]:
    """The texts in the fields of a format."""
    assert dataclasses.is_dataclass(format)
    found: set[str] = set()
    for field in dataclasses.fields(format):
        value = getattr(format, field.name)
        found |= {value} if isinstance(value, str) else set(value) if isinstance(value, tuple) else set()
    return frozenset(found)
