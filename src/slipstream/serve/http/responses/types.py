"""The bodies of OpenAI's POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.serve.http.openai.fields import Label, Refused


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that are null or absent have the defaults of the model's generation_config.json."""

    input: Annotated[str | list[dict[str, Any]], _doc("a text, or messages, calls and their results")]
    model: Annotated[str | None, _doc("a name from /v1/models; default: the first model that generates")] = None
    instructions: Annotated[str | None, _doc("the system message; not kept for later responses")] = None
    previous_response_id: Annotated[str | None, _doc("continue the conversation of a stored response")] = None
    store: Annotated[bool | None, _doc("keep the response for later ones; default: true")] = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[dict[str, Any]] | None, _doc("functions that the model can call")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, _doc("auto, none, required, a function, or allowed_tools")] = (
        None
    )
    parallel_tool_calls: Annotated[bool | None, _doc("false: at most one call")] = None
    text: Annotated[dict[str, Any] | None, _doc("format: text, json_object or json_schema")] = None
    reasoning: Annotated[dict[str, Any] | None, _doc("effort, passed to the chat template")] = None
    metadata: Annotated[dict[str, str] | None, _doc("returned with the response")] = None

    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    include: Annotated[list[str] | None, _doc("nothing: the output has all there is; other values are refused")] = None

    background: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    max_tool_calls: Refused = None
    top_logprobs: Refused = None
    truncation: Refused = None
    service_tier: Refused = None
    stream_options: Refused = None
    prompt_cache_retention: Refused = None
    prompt_cache_options: Refused = None
    context_management: Refused = None
    moderation: Refused = None
    image: Refused = None
    access_programs: Refused = None


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "use /v1/batches"),
    "conversation": ((), "use previous_response_id"),
    "prompt": ((), "the server stores no prompts"),
    "max_tool_calls": ((), "the server runs no tools; use parallel_tool_calls"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
    "truncation": (("disabled",), "a conversation that is too long is refused"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "stream_options": (({}, {"include_obfuscation": False}), "events are not padded"),
    "prompt_cache_retention": (("in_memory",), "cached prompts stay until their memory is needed"),
    "prompt_cache_options": (({},), "cached prompts stay until their memory is needed"),
    "context_management": (([],), "send the items that the model shall read"),
    "moderation": ((), "the server has no moderation"),
    "image": ((), "models write text only"),
    "access_programs": ((), "there are none"),
}


class ResponsesContent(msgspec.Struct, omit_defaults=True):
    """A part of type output_text or reasoning_text."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponsesItem(msgspec.Struct, omit_defaults=True):
    """An item of type reasoning, message or function_call."""

    id: str
    type: str
    status: str
    role: str | None = None
    content: list[ResponsesContent] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ResponsesItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    metadata: dict[str, str] = {}


class ResponsesDeleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"
