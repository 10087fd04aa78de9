"""Checks the tools of a chat request, and which of them the model must, may or may not call."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.base.typed import InnerFields, untagged, wanted
from slipstream.front.served import ServedModel
from slipstream.params.structured import StructuredOutputsParams
from slipstream.parsers.families import NO_PARSER, checkpoint_formats, detect_tools, reasoning_of, tool_call_format
from slipstream.parsers.output_parser import Functions, HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.serve.http.generation.fields import NoFields
from slipstream.serve.http.server.errors import as_type, bad_request
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer

FunctionName = Annotated[
    str, wanted("1 to 128 letters, digits, underscores, dashes or dots", pattern=r"^[\w.\-]{1,128}$(?!\n)")
]


class FunctionSpec(InnerFields):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | NoFields | None = None
    strict: bool | None = None


class FunctionTool(InnerFields, tag="function"):
    """A tool of OpenAI's chat API, and of others that have its format."""

    function: FunctionSpec


class CalledFunction(InnerFields):
    """A call of an earlier answer."""

    name: str
    arguments: str


class Named(InnerFields):
    name: str


class NamedFunction(InnerFields, tag="function"):
    function: Named


class AllowedFunctions(InnerFields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], msgspec.Meta(min_length=1)]


class AllowedTools(InnerFields, tag="allowed_tools"):
    allowed_tools: AllowedFunctions


ToolChoice = Annotated[Literal["auto", "none", "required"] | NamedFunction | AllowedTools, untagged("function")]


Mode = Literal["auto", "none", "required", "function"]


class CallChoice(NamedTuple):
    """Which tools a model calls, of any API."""

    mode: Mode = "auto"
    function: str | None = None  # the only one to call, with the mode "function"
    allowed: Sequence[str] | None = None  # the functions that it may call; None: all


_DEFAULT = CallChoice()


class Tools(msgspec.Struct, frozen=True):
    """The tools of one request, in the format of OpenAI's chat API."""

    listed: list[dict[str, Any]] = []
    choice: Mode = "auto"
    function: str | None = None  # the only one to call, with the choice "function"
    parallel: bool = True  # several calls in one answer
    path: str = ".function"  # of a function in a tool of the request

    @classmethod
    def of_chat(
        cls, tools: list[Any] | None, choice: Any = None, parallel: bool | None = None, *, strict: bool = False
    ) -> Tools:
        """Those of OpenAI's chat API, as JSON: the prompt has their fields in the order of the request. `choice`: a
        ToolChoice. `strict`: all of them are."""
        as_type(list[FunctionTool], tools or [], "tools")
        functions = []
        for tool in tools or ():
            given = {name: value for name, value in tool["function"].items() if value is not None}
            functions.append(given | ({"strict": True} if strict else {}))
        return cls.of(functions, _choice(choice), parallel)

    @classmethod
    def of(
        cls,
        functions: Sequence[dict[str, Any]],
        choice: CallChoice = _DEFAULT,
        parallel: bool | None = None,
        *,
        path: str = ".function",
        schema: str = "parameters",
    ) -> Tools:
        """`functions`: as FunctionSpec, checked by a type. `path`, `schema`: where a tool of a request has a function,
        and the name of its parameters."""
        names = [function["name"] for function in functions]
        for index, function in enumerate(functions):
            _check_schema(function.get("parameters") or {}, f"tools[{index}]{path}.{schema}")
            if names[index] in names[:index]:
                fact = f"tools has the function {names[index]!r} twice"
                raise bad_request(f"{fact}; rename one", f"tools[{index}]{path}.name")
        for name in [*(choice.allowed or ()), *([] if choice.function is None else [choice.function])]:
            if name not in names:
                has = f"tools has {', '.join(names) or 'no function'}"
                raise bad_request(f"tool_choice names {name!r:.100}, and {has}", "tool_choice")
        if choice.mode == "required" and not names:
            raise bad_request("tool_choice demands a call, and there are no tools; give tools", "tool_choice")
        if parallel is False and not names:
            raise bad_request("parallel_tool_calls needs tools; give some, or remove this", "parallel_tool_calls")
        chosen = [each for each in functions if choice.allowed is None or each["name"] in choice.allowed]
        listed = [{"type": "function", "function": each} for each in chosen]
        return cls(listed, choice.mode, choice.function, parallel is not False, path)

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


def _choice(given: Any) -> CallChoice:
    match given:
        case NamedFunction(Named(name)):
            return CallChoice("function", name)
        case AllowedTools(AllowedFunctions(mode, tools)):
            return CallChoice(mode, allowed=[tool.function.name for tool in tools])
    return CallChoice(given or "auto")


def _check_schema(schema: dict[str, Any], path: str) -> None:
    """Raises for a schema that is too large or too deep."""
    try:
        StructuredOutputsParams(json=schema)
    except InvalidParams as error:
        raise bad_request(f"{path} {str(error).removeprefix('structured_outputs: json ')}", path) from None


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
        return _formats(tokenizer, settings.tool_call_parser, settings.reasoning_parser)

    @property
    def is_harmony(self) -> bool:
        """Whether reasoning, content and calls are messages of gpt-oss's format."""
        return isinstance(self.reasoning, HarmonyFormat) or isinstance(self.tools, HarmonyFormat)

    def uses_special_tokens(self, tokenizer: Tokenizer, *, with_tools: bool) -> bool:
        """Whether a marker is a special token, which is not part of the text by default."""
        formats = (self.reasoning, self.tools if with_tools else None)
        return any(_has_special_markers(format, tokenizer) for format in formats if format is not None)


@lru_cache(maxsize=64)
def _formats(tokenizer: Tokenizer, tools: str | None, reasoning: str | None) -> ChatFormats:
    """By the names, else by the response template of the checkpoint, else by its chat template."""
    own = checkpoint_formats(tokenizer.settings)[1] if tools is None else None
    if tools is None and own is None:
        tools = detect_tools(tokenizer.chat_template(with_tools=True)) or GENERIC
    return ChatFormats(
        reasoning_of(tokenizer.chat_template(), reasoning, tokenizer.settings),
        own if tools is None else None if tools == NO_PARSER else tool_call_format(tools),
        has_short_ids=tools == "mistral",
    )


@lru_cache(maxsize=64)
def _has_special_markers(format: Hashable, tokenizer: Tokenizer) -> bool:
    """Whether one of the texts in the fields of a format has a special token."""
    assert dataclasses.is_dataclass(format)
    markers: set[str] = set()
    for field in dataclasses.fields(format):
        value = getattr(format, field.name)
        markers |= {value} if isinstance(value, str) else set(value) if isinstance(value, tuple) else set()
    special = {text for token in tokenizer.special_ids if (text := tokenizer.piece(token))}
    return any(text in marker for text in special for marker in markers)
