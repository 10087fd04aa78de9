"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from slipstream.base.typed import Fields, InnerFields, doc, unsupported, wanted
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.admin.tokenize import check_chars
from slipstream.serve.http.generation.chat_run import Block, BlockDelta, BlockEvent, BlockStart, ChatRun, Ended, respond
from slipstream.serve.http.generation.conversation import ChatConversation, read_messages
from slipstream.serve.http.generation.dialect import (
    Call,
    assistant_message,
    call_arguments,
    chat_params,
    json_shape,
    think_variables,
    thinking_switch,
)
from slipstream.serve.http.generation.fields import Label, NoFields, NumTokens
from slipstream.serve.http.generation.tools import CallChoice, FunctionName, Mode, Tools
from slipstream.serve.http.server.error_formats import ANTHROPIC_EVENTS
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import Response, StreamingResponse, json_response, named_event

# The request.


class CacheControl(InnerFields, kw_only=True):
    """Prompts are cached without it."""

    type: Literal["ephemeral"]
    ttl: Label = None


class _Block(InnerFields, kw_only=True):
    cache_control: CacheControl | None = None
    citations: Annotated[Any, unsupported("answers have none; remove it", [])] = None
    caller: Annotated[Any, unsupported("the server runs no programs; remove it", {"type": "direct"})] = None


class TextBlock(_Block, kw_only=True, tag="text"):
    text: str


class ThinkingBlock(_Block, kw_only=True, tag="thinking"):
    thinking: str
    signature: Label = None  # ours are empty: there is nothing to verify


class ToolUseBlock(_Block, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] | NoFields | None = None


class ToolResultBlock(_Block, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class UserMessage(InnerFields, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class SystemMessage(UserMessage, tag="system"):
    pass


class AssistantMessage(InnerFields, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class AnthropicTool(InnerFields, kw_only=True):
    name: FunctionName
    type: Annotated[Literal["custom"] | None, wanted("custom: the server runs no tools of its own")] = None
    description: str | None = None
    input_schema: dict[str, Any] | NoFields | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: Annotated[Any, unsupported("all tools are in the prompt; remove it", False)] = None
    allowed_callers: Annotated[Any, unsupported("the server runs no programs; remove it", ["direct"])] = None
    input_examples: Annotated[Any, unsupported("put them into the description", [])] = None


class AnthropicChoice(InnerFields, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, doc("of the tool, with type tool")] = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(InnerFields, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[NumTokens | None, doc("with type enabled")] = None
    display: Annotated[Any, unsupported("thinking is returned whole; remove it", "summarized")] = None


class OutputFormat(InnerFields, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(InnerFields):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Fields, kw_only=True):
    """The fields that form the prompt."""

    model: str
    messages: Annotated[
        list[UserMessage | AssistantMessage | SystemMessage],
        doc("the last may be the assistant's: its text is continued"),
    ]
    system: Annotated[str | list[TextBlock] | None, doc("the system message")] = None
    tools: Annotated[list[AnthropicTool] | None, doc("functions that the model can call")] = None
    tool_choice: AnthropicChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, doc("older name of output_config.format")] = None
    cache_control: Label = None
    user_profile_id: Label = None
    workspace_id: Label = None
    speed: Annotated[Any, unsupported("there is one speed", "standard")] = None
    mcp_servers: Annotated[Any, unsupported("the server calls no other servers", [])] = None
    context_management: Annotated[Any, unsupported("send the messages that the model shall read", {})] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Label = None
    service_tier: Annotated[Any, unsupported("there is one tier", "auto", "standard_only")] = None
    container: Annotated[Any, unsupported("the server runs no code")] = None
    diagnostics: Annotated[Any, unsupported("see /metrics and the server's log", {})] = None
    inference_geo: Annotated[Any, unsupported("there is one region", "global")] = None


# Converts a request to a conversation.


def messages_conversation(request: Request, body: CountTokensRequest) -> ChatConversation:
    """Checks what no type says."""
    served = request.choose_model(body.model, "generate")
    system = [] if not body.system else [{"role": "system", "content": _text(body.system)}]
    messages = [*system, *(message for given in body.messages for message in _messages(served, given))]
    checked = read_messages(request, messages, served.tokenizer)
    config = body.output_config or OutputConfig()
    form = config.format or body.output_format
    if body.output_format not in (None, form):
        raise bad_request("output_format and output_config.format differ; remove one of them", "output_format")
    variables, budget = {}, None
    if body.thinking is not None:
        budget = body.thinking.budget_tokens
        variables = thinking_switch(served, body.thinking.type, budget, "budget_tokens")
    if config.effort is not None:
        variables |= think_variables(served, config.effort, "output_config")
    params, limit = SamplingParams(), None
    if isinstance(body, MessagesRequest):
        limit = body.max_tokens
        given = {
            "temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p, "stop": body.stop_sequences,
            "response_format": None if form is None else json_shape(form.schema), "thinking_token_budget": budget,
        }  # fmt: skip
        names = {"stop": "stop_sequences", "response_format": "output_config", "thinking_token_budget": "thinking"}
        params = chat_params(request, served, given, limit, names)
    last = messages[-1] if body.messages else {}
    request.check_count(len(body.tools or ()), "tools")
    return ChatConversation(
        model=served,
        messages=checked,
        params=params,
        max_tokens=limit,
        tools=_tools(body),
        chat_template_kwargs=variables,
        continue_final_message=last.get("role") == "assistant" and not last.get("tool_calls"),
    )


def _messages(served: ServedModel, given: UserMessage | AssistantMessage) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text."""
    role, content = given.__struct_config__.tag, given.content
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    text, reasoning = "", ""
    texts, calls, results = list[str](), list[Call](), list[dict[str, Any]]()
    for block in content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                reasoning += block.thinking
            case ToolUseBlock():
                calls.append((block.id, block.name, json.dumps(block.input or {}, ensure_ascii=False)))
            case ToolResultBlock():
                text = "Error: " * bool(block.is_error) + _text(block.content or "")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    if isinstance(given, AssistantMessage):
        return [assistant_message(served, "".join(texts), reasoning, calls)]
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts or not results else [])]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join([block.text for block in content])


_MODES: dict[str, Mode] = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}


def _tools(body: CountTokensRequest) -> Tools:
    functions = []
    for tool in body.tools or ():
        own = {"name": tool.name, "parameters": tool.input_schema or {}}
        more = {"description": tool.description, "strict": tool.strict}
        functions.append(own | {name: value for name, value in more.items() if value is not None})
    given, choice = body.tool_choice, CallChoice()
    if given is not None:
        if (given.name is None) == (given.type == "tool"):
            fact = f"tool_choice is of type {given.type} and has {'no' if given.name is None else 'a'} name"
            raise bad_request(f"{fact}; give a name with type tool, and with no other", "tool_choice.name")
        choice = CallChoice(_MODES[given.type], given.name)
    serial = given is not None and given.disable_parallel_tool_use
    return Tools.of(functions, choice, False if serial else None, path="", schema="input_schema")


# The answer, whole or as the events of a stream.


class ContentBlock(msgspec.Struct, omit_defaults=True):
    """A block of type text, thinking or tool_use."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | msgspec.Raw | None = None


class MessagesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessagesResponse(msgspec.Struct):
    id: str
    type: str
    role: str
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class _Writer:
    format = ANTHROPIC_EVENTS

    def __init__(self, request: Request, conversation: ChatConversation, tools: list[AnthropicTool] | None) -> None:
        self._id = f"msg_{request.id}"
        self._model = conversation.model.description.name
        self._streamed = _streamed(conversation.tools, tools)

    def _message(self, run: ChatRun, content: list[ContentBlock]) -> MessagesResponse:
        state = run.state
        num_prompt = len(state.message.prompt_token_ids)
        usage = MessagesUsage(num_prompt - state.num_cached, state.num_tokens, state.num_cached)
        return MessagesResponse(self._id, "message", "assistant", self._model, content, None, None, usage)

    async def whole(self, ended: Ended) -> MessagesResponse:
        message = self._message(ended.run, [_content(block) for block in ended.blocks])
        message.stop_reason, message.stop_sequence = _stop(ended)
        return message

    def begin(self, run: ChatRun) -> bytes:
        begun = self._message(run, [])
        begun.usage.output_tokens = 0
        return _event("message_start", message=begun)

    def events(self, found: list[BlockEvent]) -> bytes:
        return b"".join(map(self._of_block, found))

    async def end(self, ended: Ended) -> bytes:
        stop_reason, stop_sequence = _stop(ended)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        usage = self._message(ended.run, []).usage
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def _of_block(self, event: BlockEvent) -> bytes:
        block, index = event.block, event.block.index
        is_whole = block.kind == "call" and block.name not in self._streamed
        if isinstance(event, BlockStart):
            empty = Block(block.kind, index, "", block.name, block.id)
            return _event("content_block_start", index=index, content_block=_content(empty))
        if isinstance(event, BlockDelta):
            return b"" if is_whole else _delta(block, event.text)
        ended = _event("content_block_stop", index=index)
        if not is_whole or not block.text:
            return ended
        return _delta(block, msgspec.json.encode(_content(block).input).decode()) + ended


def _streamed(tools: Tools, given: list[AnthropicTool] | None) -> frozenset[str]:
    """The tools whose input is streamed as the model writes it: a grammar makes it JSON, or the request asks for it.
    Others are sent when they are whole, since the client fails at the first piece that continues no JSON."""
    if tools.are_forced:
        return frozenset(tool["function"]["name"] for tool in tools.listed)
    return frozenset([*tools.strict, *(tool.name for tool in given or () if tool.eager_input_streaming)])


def _content(block: Block) -> ContentBlock:
    if block.kind == "text":
        return ContentBlock("text", text=block.text)
    if block.kind == "reasoning":
        return ContentBlock("thinking", thinking=block.text, signature="")
    arguments = call_arguments(block.text)
    # the format has objects only: text that is none is not lost
    given = {"text": block.text} if arguments is None else arguments
    return ContentBlock("tool_use", id=block.id, name=block.name, input=given)


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _delta(block: Block, text: str) -> bytes:
    kind, name = _DELTAS[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: text})


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _stop(ended: Ended) -> tuple[str | None, str | None]:
    """The reason and the stop sequence. An answer with calls ends for them, demanded ones too."""
    reason = ended.reason
    if reason == "stop" and any(block.kind == "call" for block in ended.blocks):
        return "tool_use", None
    if reason == "stop" and isinstance(ended.stopped_by, str):
        return "stop_sequence", ended.stopped_by
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(reason or "", reason), None


async def create_message(request: Request, body: MessagesRequest) -> Response | StreamingResponse:
    conversation = messages_conversation(request, body)
    return await respond(request, conversation, _Writer(request, conversation, body.tools), stream=bool(body.stream))


async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    conversation = messages_conversation(request, body)
    tokenizer = conversation.model.tokenizer
    size = conversation.num_chars
    check_chars(size, "messages")

    def count() -> int:
        text = conversation.render()
        assert tokenizer is not None, "a chat template needs a tokenizer"
        return len(tokenizer.encode(text, add_special_tokens=False))

    return json_response(TokenCount(await request.state.off_loop(size, count)))


ROUTES = [
    post("/v1/messages", create_message, "Anthropic: the next message", MessagesRequest,
         response_model=MessagesResponse),
    post("/v1/messages/count_tokens", count_tokens, "Anthropic: tokens of a prompt", CountTokensRequest,
         response_model=TokenCount, uses_queue=False),
]  # fmt: skip
