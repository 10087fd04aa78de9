"""The bodies of POST /v1/chat/completions: request, response and chunks of a stream."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.serve.http.openai.fields import GenerationFields, Refused
from slipstream.serve.http.openai.generation import Usage
from slipstream.serve.http.openai.logprobs import ChatLogprobs, PromptLogprob
from slipstream.serve.http.openai.messages import AllowControlTokens


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, _doc("variables of the chat template")] = None
    allow_control_tokens: AllowControlTokens = None

    tools: Annotated[list[Any] | None, _doc("functions that the model can call")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        _doc("auto, none, required, a function, or allowed_tools; demanded calls by a grammar"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, _doc("false: at most one call")] = None
    include_reasoning: Annotated[bool | None, _doc("false: leave the reasoning out of the answer")] = None
    reasoning_effort: Annotated[
        str | None, _doc("passed to the chat template; none: as enable_thinking false, where the template has that")
    ] = None
    enable_thinking: Annotated[bool | None, _doc("passed to the chat template")] = None

    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    verbosity: Refused = None
    store: Refused = None
    moderation: Refused = None
    echo: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    mm_processor_kwargs: Refused = None
    media_io_kwargs: Refused = None


_FUNCTIONS = "use tools and tool_choice"
_MEDIA = "the model reads and writes text only"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), _FUNCTIONS),
    "function_call": (("none",), _FUNCTIONS),
    "modalities": ((["text"],), _MEDIA),
    "audio": ((), _MEDIA),
    "mm_processor_kwargs": (({},), _MEDIA),
    "media_io_kwargs": (({},), _MEDIA),
    "prediction": ((), "predicted outputs are not supported"),
    "web_search_options": ((), "the server has no access to the web"),
    "verbosity": (("medium",), "ask for it in the messages"),
    "store": ((False,), "the server stores nothing"),
    "moderation": ((), "the server has no moderation"),
    "echo": ((False,), "only /v1/completions has echo"),
    "chat_template": ((), "a request cannot have a template; start the server with --chat-template"),
    "documents": (([],), "put them into the messages"),
}


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    id: str
    type: str
    function: FunctionCall


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET  # the same under DeepSeek's name
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET


class FunctionCallDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCallDelta | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """The first chunk of a stream has the requested data about the prompt."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
