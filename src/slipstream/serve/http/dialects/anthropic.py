"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import msgspec

from slipstream.base.typed import Fields, unsupported
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.admin.tokenize import check_chars
from slipstream.serve.http.generation.chat_run import (
    AnswerBlocks,
    Block,
    BlockDelta,
    BlockEvent,
    BlockStart,
    ChatRun,
    blocks_of,
    start_chat,
)
from slipstream.serve.http.generation.conversation import ChatConversation, text_messages
from slipstream.serve.http.generation.dialect import (
    assistant_message,
    call_arguments,
    chat_params,
    json_shape,
    think_variables,
    thinking_budget,
)
from slipstream.serve.http.generation.fields import Label, check_fields
from slipstream.serve.http.generation.tools import Tools
from slipstream.serve.http.server.error_formats import ANTHROPIC_EVENTS
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import Response, StreamingResponse, json_response, named_event

# Converts Anthropic's messages, system prompt and tools to a ChatConversation.

_CACHE = "cache_control"  # prompts are cached without it


def messages_conversation(request: Request, body: CountTokensRequest) -> ChatConversation:
    """Checks the request."""
    served = request.choose_model(body.model, "generate")
    messages = [*_system(body.system), *_messages(served, body.messages)]
    checked = text_messages(request, messages, served.tokenizer)
    effort, shape = _output_config(body.output_config, body.output_format)
    variables, budget = _thinking(served, body.thinking)
    if effort is not None:
        variables |= think_variables(served, effort, "output_config")
    last = messages[-1] if body.messages else {}
    params, limit = SamplingParams(), None
    if isinstance(body, MessagesRequest):
        limit = body.max_tokens
        given = {
            "temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p, "stop": body.stop_sequences,
            "response_format": shape, **budget,
        }  # fmt: skip
        names = {"stop": "stop_sequences", "response_format": "output_config", "thinking_token_budget": "thinking"}
        params = chat_params(request, served, given, limit, names)
    return ChatConversation(
        model=served,
        messages=checked,
        params=params,
        max_tokens=limit,
        tools=_tools(request, body),
        chat_template_kwargs=variables,
        continue_final_message=last.get("role") == "assistant" and not last.get("tool_calls"),
    )


def _system(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not given:
        return []
    text = given if isinstance(given, str) else _texts(given, "system")
    return [{"role": "system", "content": text}]


def _messages(served: ServedModel, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        name = f"messages[{index}]"
        check_fields(message, name, ("role", "content"))
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{name}.role is {role!r:.50}; give user or assistant", f"{name}.role")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise bad_request(f"{name}.content is missing; give a text or a list of blocks", f"{name}.content")
        elif role == "assistant":
            messages.append(_assistant(served, content, f"{name}.content"))
        else:
            messages += _user(role, content, f"{name}.content")
    return messages


def _assistant(served: ServedModel, content: list[Any], name: str) -> dict[str, Any]:
    text, reasoning, calls = "", "", []
    for index, block in enumerate(content):
        path = f"{name}[{index}]"
        kind = _kind(block, path, ("text", "thinking", "tool_use"))
        if kind == "text":
            text += _string(block, "text", path)
        elif kind == "thinking":
            reasoning += _string(block, "thinking", path)
        else:
            if not isinstance(given := block.get("input") or {}, dict):
                raise bad_request(f"{path}.input is no object; give the arguments", f"{path}.input")
            arguments = json.dumps(given, ensure_ascii=False)
            calls.append((_string(block, "id", path), _string(block, "name", path), arguments))
    return assistant_message(served, text, reasoning, calls)


def _user(role: str, content: list[Any], name: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text."""
    found: list[dict[str, Any]] = []
    texts = []
    for index, block in enumerate(content):
        path = f"{name}[{index}]"
        if _kind(block, path, ("text", "tool_result")) == "text":
            texts.append(_string(block, "text", path))
            continue
        inner = block.get("content") or ""
        text = inner if isinstance(inner, str) else _texts(inner, f"{path}.content")
        if block.get("is_error"):
            text = f"Error: {text}"
        found.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", path), "content": text})
    if texts or not found:
        found.append({"role": role, "content": "\n".join(texts)})
    return found


_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),  # ours are empty: there is nothing to verify
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"citations": ([],), "caller": ({"type": "direct"},)}


def _kind(block: Any, path: str, known: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in known:
        fact = f"{path} is a block of type {kind!r:.50}, which is not supported here"
        raise bad_request(f"{fact}; give {', '.join(known)}", path, "unsupported_content")
    check_fields(block, path, ("type", _CACHE, *_FIELDS[kind]), _NEUTRAL)
    _check_cache(block, path)
    return kind


def _check_cache(given: Mapping[str, Any], path: str) -> None:
    """Prompts are cached without cache_control, so only its form is checked."""
    if (cache := given.get(_CACHE)) is not None:
        name = f"{path}.{_CACHE}"
        if not isinstance(cache, dict) or cache.get("type") != "ephemeral":
            raise bad_request(f"{name} is {cache!r:.100}; give type ephemeral", name)
        check_fields(cache, name, ("type", "ttl"))


def _texts(blocks: Any, name: str) -> str:
    if not isinstance(blocks, list):
        raise bad_request(f"{name} must be a text or a list of text blocks", name)
    texts = []
    for index, block in enumerate(blocks):
        _kind(block, f"{name}[{index}]", ("text",))
        texts.append(_string(block, "text", f"{name}[{index}]"))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], field: str, path: str) -> str:
    if not isinstance(value := block.get(field), str):
        raise bad_request(f"{path}.{field} is missing or no text; give a string", f"{path}.{field}")
    return value


_TOOL_FIELDS = ("type", _CACHE, "name", "description", "input_schema", "strict", "eager_input_streaming")
_NEUTRAL_TOOL = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}


def _tools(request: Request, body: CountTokensRequest) -> Tools:
    request.check_count(len(body.tools or ()), "tools")
    tools = []
    for index, tool in enumerate(body.tools or ()):
        name = f"tools[{index}]"
        if (kind := tool.get("type")) not in (None, "custom"):
            raise bad_request(f"{name} is of type {kind!r:.50}; give functions with an input_schema", f"{name}.type")
        check_fields(tool, name, _TOOL_FIELDS, _NEUTRAL_TOOL)
        _check_cache(tool, name)
        if (eager := tool.get("eager_input_streaming")) not in (None, True, False):
            fact = f"{name}.eager_input_streaming is {eager!r:.50}"
            raise bad_request(f"{fact}; give true or false", f"{name}.eager_input_streaming")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        function |= {field: tool[field] for field in ("description", "strict") if tool.get(field) is not None}
        tools.append({"type": "function", "function": function})
    choice, parallel = _tool_choice(body.tool_choice)
    return Tools.check(tools, choice, parallel, schema="input_schema")


def _tool_choice(given: dict[str, Any] | None) -> tuple[Any, bool | None]:
    if given is None:
        return None, None
    known = {"auto": "auto", "any": "required", "none": "none", "tool": None}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in known:
        fact = f"tool_choice is {given!r:.100}"
        raise bad_request(f"{fact}; give type auto, any, tool (with name) or none", "tool_choice")
    names = ("type", "name") if kind == "tool" else ("type",)
    check_fields(given, "tool_choice", (*names, "disable_parallel_tool_use"))
    choice: Any = known[kind] or {"type": "function", "function": {"name": given.get("name")}}
    return choice, False if given.get("disable_parallel_tool_use") else None


_THINKING = ("enabled", "disabled", "adaptive")


def _thinking(served: ServedModel, given: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables of the chat template, and the parameters of a budget."""
    if given is None:
        return {}, {}
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in _THINKING:
        raise bad_request(f"thinking is {given!r:.100}; give type enabled, disabled or adaptive", "thinking")
    check_fields(given, "thinking", ("type", "budget_tokens", "display"))
    if given.get("display") not in (None, "summarized"):
        raise bad_request("thinking.display is not supported: thinking is returned whole; remove it", "thinking")
    if budget is not None and kind != "enabled":
        raise bad_request(f"thinking.budget_tokens needs type enabled, and it is {kind}; remove one", "thinking")
    return think_variables(served, kind != "disabled", "thinking"), thinking_budget(budget, "thinking")


def _output_config(
    config: dict[str, Any] | None, older: dict[str, Any] | None
) -> tuple[str | None, dict[str, Any] | None]:
    """Returns the effort and OpenAI's `response_format`."""
    given = {name: value for name, value in (config or {}).items() if value is not None}
    check_fields(given, "output_config", ("format", "effort"))
    form, effort = given.get("format", older), given.get("effort")
    if not isinstance(effort, str | None):
        raise bad_request(f"output_config is {given!r:.100}; give effort and format", "output_config")
    if older not in (None, form):
        raise bad_request("output_format and output_config.format differ; remove one of them", "output_format")
    if form is None:
        return effort, None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(form, dict) or not isinstance(schema, dict) or form.get("type") != "json_schema":
        name = "output_config" if older is None else "output_format"
        raise bad_request(f"{name} has no schema; give a format of type json_schema with a schema", name)
    check_fields(form, "output_format" if config is None else "output_config.format", ("type", "schema"))
    return effort, json_shape(schema)


# The bodies of Anthropic's POST /v1/messages.


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class CountTokensRequest(Fields, kw_only=True):
    """The fields that form the prompt."""

    model: str
    messages: Annotated[list[dict[str, Any]], _doc("the last may be the assistant's: its text is continued")]
    system: Annotated[str | list[dict[str, Any]] | None, _doc("the system message")] = None
    tools: Annotated[list[dict[str, Any]] | None, _doc("functions that the model can call")] = None
    tool_choice: Annotated[dict[str, Any] | None, _doc("type is auto, any, tool or none")] = None
    thinking: Annotated[dict[str, Any] | None, _doc("type is enabled, disabled or adaptive")] = None
    output_config: Annotated[dict[str, Any] | None, _doc("effort; format with a JSON schema")] = None
    output_format: Annotated[dict[str, Any] | None, _doc("older name of output_config.format")] = None
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


async def create_message(request: Request, body: MessagesRequest) -> Response | StreamingResponse:
    conversation = messages_conversation(request, body)
    run = await start_chat(request, conversation, stream=bool(body.stream))
    answer = _Answer(request, conversation.model.description.name, _streamed(conversation.tools, body.tools))
    if body.stream:
        return StreamingResponse(answer.events(run), ANTHROPIC_EVENTS)
    with run:
        (found,) = await run.answers()
        message = answer.message(run, [_content(block) for block in blocks_of(found)])
        calls = bool(found.calls)
        message.stop_reason, message.stop_sequence = _stop(found.finish_reason, found.sample.stop_reason, calls)
        return json_response(message)


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


def _streamed(tools: Tools, given: list[dict[str, Any]] | None) -> frozenset[str]:
    """The tools whose input is streamed as the model writes it: a grammar makes it JSON, or the request asks for it.
    Others are sent when they are whole, since the client fails at the first piece that continues no JSON."""
    if tools.are_forced:
        return frozenset(tool["function"]["name"] for tool in tools.listed)
    return frozenset([*tools.strict, *(tool["name"] for tool in given or () if tool.get("eager_input_streaming"))])


class _Answer:
    def __init__(self, request: Request, model: str, streamed: frozenset[str]) -> None:
        self.id = f"msg_{request.id}"
        self.model = model
        self.streamed = streamed

    def message(self, run: ChatRun, content: list[ContentBlock]) -> MessagesResponse:
        state = run.state
        num_prompt = len(state.message.prompt_token_ids)
        usage = MessagesUsage(num_prompt - state.num_cached, state.num_tokens, state.num_cached)
        return MessagesResponse(self.id, "message", "assistant", self.model, content, None, None, usage)

    async def events(self, run: ChatRun) -> AsyncIterator[bytes]:
        blocks, has_begun = AnswerBlocks(), False
        with run:
            async for parts in run:
                chunks = []
                for part in parts:
                    if not has_begun:
                        has_begun = True
                        begin = self.message(run, [])
                        begin.usage.output_tokens = 0
                        chunks.append(_event("message_start", message=begin))
                    events = [*blocks.feed(part.events), *(blocks.end() if part.finish_reason else ())]
                    chunks += [self.block_event(each) for each in events]
                    if part.finish_reason is not None:
                        calls = any(block.kind == "call" for block in blocks.all)
                        chunks += self.end(run, _stop(part.finish_reason, part.new.stop_reason, calls))
                if chunks:
                    yield b"".join(chunks)

    def block_event(self, event: BlockEvent) -> bytes:
        block, index = event.block, event.block.index
        is_whole = block.kind == "call" and block.name not in self.streamed
        if isinstance(event, BlockStart):
            empty = Block(block.kind, index, "", block.name, block.id)
            return _event("content_block_start", index=index, content_block=_content(empty))
        if isinstance(event, BlockDelta):
            return b"" if is_whole else _delta(block, event.text)
        ended = _event("content_block_stop", index=index)
        if not is_whole or not block.text:
            return ended
        return _delta(block, msgspec.json.encode(_content(block).input).decode()) + ended

    def end(self, run: ChatRun, stop: tuple[str | None, str | None]) -> list[bytes]:
        stop_reason, stop_sequence = stop
        usage = self.message(run, []).usage
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]


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


def _stop(reason: str | None, stopped_by: int | str | None, calls: bool) -> tuple[str | None, str | None]:
    """The reason and the stop sequence. An answer with calls ends for them, demanded ones too."""
    if calls and reason == "stop":
        return "tool_use", None
    if reason == "stop" and isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(reason or "", reason), None


ROUTES = [
    post("/v1/messages", create_message, "Anthropic: the next message", MessagesRequest,
         response_model=MessagesResponse),
    post("/v1/messages/count_tokens", count_tokens, "Anthropic: tokens of a prompt", CountTokensRequest,
         response_model=TokenCount, uses_queue=False),
]  # fmt: skip
