"""Requests of OpenAI's /v1/responses: their types, and as messages and tools of a conversation.

What is given back with the response, or listed as its input, is so as it was given: UNSET is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from slipstream.base.typed import Fields, InnerFields, doc, unsupported, untagged, wanted
from slipstream.front.decisions import json_text
from slipstream.front.served import ServedModel
from slipstream.serve.http.generation.dialect import assistant_message
from slipstream.serve.http.generation.fields import Label, NoFields, ObjectFormat, TextFormat
from slipstream.serve.http.generation.tools import CallChoice, FunctionName, Tools
from slipstream.text.chat_template import known_roles


class _ContentPart(InnerFields, kw_only=True):
    annotations: Annotated[Any, unsupported("models write none; remove it", [])] = UNSET
    logprobs: Annotated[Any, unsupported("prompts have none; remove it", [])] = UNSET


class InputText(_ContentPart, kw_only=True, tag="input_text"):
    text: str


class OutputText(_ContentPart, kw_only=True, tag="output_text"):
    text: str


class PlainText(_ContentPart, kw_only=True, tag="text"):
    text: str


class Refusal(_ContentPart, kw_only=True, tag="refusal"):
    refusal: str


class InputJson(_ContentPart, kw_only=True, tag="input_json"):
    data: dict[str, Any] | list[dict[str, Any]]

    @property
    def text(self) -> str:
        return json_text(self.data)


class ReasoningText(_ContentPart, kw_only=True, tag="reasoning_text"):
    text: str


class SummaryText(_ContentPart, kw_only=True, tag="summary_text"):
    text: str


InputContent = str | list[InputText | OutputText | PlainText | Refusal | InputJson]


class _InputItem(InnerFields, kw_only=True, rename={"async_": "async"}):
    id: Label = UNSET
    status: Label = UNSET
    caller: Annotated[Any, unsupported("the server runs no programs; remove it", {"type": "direct"})] = UNSET
    async_: Annotated[Any, unsupported("the server runs no tools; remove it", False)] = UNSET
    encrypted_content: Annotated[
        Any, unsupported("only the server that wrote it can read it; give the reasoning as content")
    ] = UNSET


class InputMessage(_InputItem, kw_only=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class FunctionCallItem(_InputItem, kw_only=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionResult(_InputItem, kw_only=True, tag="function_call_output"):
    call_id: str
    output: InputContent


class ReasoningItem(_InputItem, kw_only=True, tag="reasoning"):
    content: str | list[ReasoningText] | UnsetType | None = UNSET
    summary: str | list[SummaryText] | UnsetType | None = UNSET


InputItem = Annotated[InputMessage | FunctionCallItem | FunctionResult | ReasoningItem, untagged("message")]


class ResponsesTool(InnerFields, kw_only=True):
    type: Annotated[Literal["function"], wanted("function: the server runs no tools")]
    name: FunctionName
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | NoFields | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET
    defer_loading: Annotated[Any, unsupported("all tools are in the prompt; remove it", False)] = UNSET
    allowed_callers: Annotated[Any, unsupported("the server runs no programs; remove it", ["direct"])] = UNSET


class FunctionChoice(InnerFields, tag="function"):
    name: str


class AllowedFunction(InnerFields):
    type: Literal["function"]
    name: str


class AllowedChoice(InnerFields, tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], msgspec.Meta(min_length=1)]


ResponsesChoice = Literal["auto", "none", "required"] | FunctionChoice | AllowedChoice


class FlatSchema(InnerFields, tag="json_schema"):
    schema: dict[str, Any]
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class TextOptions(InnerFields):
    format: TextFormat | ObjectFormat | FlatSchema | None = None
    verbosity: Annotated[Any, unsupported("ask for it in the messages", "medium")] = UNSET


class ReasoningOptions(InnerFields):
    effort: Annotated[str | UnsetType | None, doc("passed to the chat template")] = UNSET
    summary: Annotated[Any, unsupported("reasoning is returned whole; remove it", "auto")] = UNSET
    generate_summary: Annotated[Any, unsupported("reasoning is returned whole; remove it", "auto")] = UNSET


class ResponsesRequest(Fields, kw_only=True):
    """Fields that are null or absent have the defaults of the model's generation_config.json."""

    input: Annotated[str | list[InputItem], doc("a text, or messages, calls and their results")]
    model: Annotated[str | None, doc("a name from /v1/models; default: the first model that generates")] = None
    instructions: Annotated[str | None, doc("the system message; not kept for later responses")] = None
    previous_response_id: Annotated[str | None, doc("continue the conversation of a stored response")] = None
    store: Annotated[bool | None, doc("keep the response for later ones; default: true")] = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[ResponsesTool] | None, doc("functions that the model can call")] = None
    tool_choice: ResponsesChoice | None = None
    parallel_tool_calls: Annotated[bool | None, doc("false: at most one call")] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, str] | None, doc("returned with the response")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, doc("auto: leave out the oldest messages of a long conversation")
    ] = None

    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    include: Annotated[
        Any,
        unsupported("nothing is left out, and reasoning is returned as text, which can be sent back; remove it", []),
    ] = None
    background: Annotated[Any, unsupported("use /v1/batches", False)] = None
    conversation: Annotated[Any, unsupported("use previous_response_id")] = None
    prompt: Annotated[Any, unsupported("the server stores no prompts")] = None
    max_tool_calls: Annotated[Any, unsupported("the server runs no tools; use parallel_tool_calls")] = None
    top_logprobs: Annotated[Any, unsupported("use /v1/chat/completions", 0)] = None
    service_tier: Annotated[Any, unsupported("there is one tier", "auto", "default")] = None
    stream_options: Annotated[Any, unsupported("events are not padded", {}, {"include_obfuscation": False})] = None
    prompt_cache_retention: Annotated[
        Any, unsupported("cached prompts stay until their memory is needed", "in_memory")
    ] = None
    prompt_cache_options: Annotated[Any, unsupported("cached prompts stay until their memory is needed", {})] = None
    context_management: Annotated[Any, unsupported("send the items that the model shall read", [])] = None
    moderation: Annotated[Any, unsupported("the server has no moderation")] = None
    image: Annotated[Any, unsupported("models write text only")] = None
    access_programs: Annotated[Any, unsupported("there are none")] = None


# Converts a request to a conversation.


def input_messages(served: ServedModel, given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of the items. Reasoning, text and calls of one answer are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    answer = _EarlierAnswer(served)
    for item in given:
        match item:
            case ReasoningItem():
                answer.next_reasoning += _text(item.content or "") or _text(item.summary or "")
            case FunctionCallItem():
                answer.settle()
                answer.calls.append((item.call_id, item.name, item.arguments))
            case InputMessage(role="assistant"):
                if answer.text or answer.calls:
                    messages += answer.take()  # the reasoning behind them is that of this item
                answer.settle()
                answer.text = _text(item.content)
            case InputMessage(role=role):
                answer.settle()
                messages += [*answer.take(), {"role": _role(served, role), "content": _text(item.content)}]
            case FunctionResult():
                answer.settle()
                result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                messages += [*answer.take(), result]
    answer.settle()
    return messages + answer.take()


class _EarlierAnswer:
    """The items of an earlier answer so far."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.text, self.reasoning = "", ""
        self.calls: list[tuple[str, str, str]] = []
        self.next_reasoning = ""  # of the item that follows, if it is of the answer too

    def settle(self) -> None:
        self.reasoning, self.next_reasoning = self.reasoning + self.next_reasoning, ""

    def take(self) -> list[dict[str, Any]]:
        """Takes the message; none if there are neither text nor calls."""
        has_any = self.text or self.calls
        found = [assistant_message(self._served, self.text, self.reasoning, self.calls)] if has_any else []
        self.text, self.reasoning, self.calls = "", "", []
        return found


def _role(served: ServedModel, role: str) -> str:
    """`developer` is `system` for templates that do not know it."""
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    return "system" if role == "developer" and (template is None or role not in known_roles(template)) else role


def _text(content: str | list[Any]) -> str:
    """`content`: a text or parts."""
    if isinstance(content, str):
        return content
    return "".join([part.refusal if isinstance(part, Refusal) else part.text for part in content])


def tools_of(body: ResponsesRequest) -> Tools:
    fields = ("name", "description", "parameters", "strict")
    functions = [
        {name: value for name in fields if (value := getattr(tool, name)) not in (None, UNSET)}
        for tool in body.tools or ()
    ]
    match body.tool_choice:
        case FunctionChoice(name):
            choice = CallChoice("function", name)
        case AllowedChoice(mode, tools):
            choice = CallChoice(mode, allowed=[tool.name for tool in tools])
        case mode:
            choice = CallChoice(mode or "auto")
    return Tools.of(functions, choice, body.parallel_tool_calls, path="")
