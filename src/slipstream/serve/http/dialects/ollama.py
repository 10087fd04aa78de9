"""Ollama's POST /api/chat and /api/generate. Streams are JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from slipstream.base.typed import unsupported
from slipstream.front.served import ServedModel
from slipstream.serve.http.dialects.ollama_models import (
    OllamaFields,
    find_model,
    num_ctx,
    ollama_params,
)
from slipstream.serve.http.generation.chat_run import (
    AnswerBlocks,
    Block,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    ChatRun,
    blocks_of,
    start_chat,
)
from slipstream.serve.http.generation.conversation import ChatConversation, text_messages
from slipstream.serve.http.generation.dialect import assistant_message, call_arguments, think_variables
from slipstream.serve.http.generation.fields import check_fields
from slipstream.serve.http.generation.tools import Tools
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import (
    JSON,
    JSON_LINES,
    Response,
    StreamingResponse,
    json_line,
    json_response,
)


class OllamaChatRequest(OllamaFields, kw_only=True):
    messages: list[dict[str, Any]] = []
    tools: Annotated[list[Any] | None, msgspec.Meta(description="functions that the model can call")] = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    prompt: str | None = None
    system: Annotated[str | None, msgspec.Meta(description="the system message")] = None
    raw: Annotated[bool | None, msgspec.Meta(description="true: without the chat template")] = None
    suffix: Annotated[Any, unsupported("infilling is not supported here; use /v1/completions", "")] = None
    images: Annotated[Any, unsupported("models read text only", [])] = None
    template: Annotated[
        Any, unsupported("a request cannot have a template; start the server with --chat-template", "")
    ] = None
    context: Annotated[Any, unsupported("use /api/chat, and send the messages", [])] = None


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | msgspec.Raw


class OllamaToolCall(msgspec.Struct):
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str = msgspec.field(default_factory=str)
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class _Chunk(msgspec.Struct, omit_defaults=True):
    model: str
    created_at: str
    done: bool = msgspec.field(default_factory=bool)
    done_reason: str | None = None
    total_duration: int | None = None  # durations are in nanoseconds
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatResponse(_Chunk, kw_only=True, omit_defaults=True):
    message: OllamaMessage


class OllamaGenerateResponse(_Chunk, kw_only=True, omit_defaults=True):
    response: str = msgspec.field(default_factory=str)
    thinking: str | None = None


async def create_chat(request: Request, body: OllamaChatRequest) -> Response | StreamingResponse:
    served = find_model(request, body.model, "generate")
    answer = _Answer(request, body)
    if not body.messages:  # clients load a model in this way
        ollama_params(request, served, body)
        return answer.loaded()
    messages = text_messages(request, _messages(served, body.messages), served.tokenizer)
    params, limit = ollama_params(request, served, body)
    request.check_count(len(body.tools or ()), "tools")
    conversation = ChatConversation(
        model=served,
        messages=messages,
        params=params,
        max_tokens=limit,
        max_context=num_ctx(body.options, served.description.max_model_len),
        truncates=body.truncate is not False,
        tools=Tools.check(body.tools, None, None),
        chat_template_kwargs=think_variables(served, body.think, "think"),
    )
    return await answer.respond(conversation)


async def create_generate(request: Request, body: OllamaGenerateRequest) -> Response | StreamingResponse:
    request.set_input_field("prompt")
    served = find_model(request, body.model, "generate")
    answer = _Answer(request, body)
    params, limit = ollama_params(request, served, body)
    if not body.prompt:
        return answer.loaded()
    system = [] if not body.system else [{"role": "system", "content": body.system}]
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    context = num_ctx(body.options, served.description.max_model_len)
    how: dict[str, Any] = dict(model=served, params=params, max_tokens=limit, max_context=context)
    how["truncates"] = body.truncate is not False
    if served.tokenizer is not None and (body.raw or template is None):  # without a tokenizer rendering raises
        for name in ("system", "think"):
            if getattr(body, name):
                raise bad_request(f"{name} needs the chat template; remove it, or raw", name)
        messages = [{"role": "user", "content": body.prompt}]
        return await answer.respond(PlainConversation(messages=messages, add_special_tokens=True, **how))
    variables = think_variables(served, body.think, "think")
    messages = [*system, {"role": "user", "content": body.prompt}]
    return await answer.respond(ChatConversation(messages=messages, chat_template_kwargs=variables, **how))


_MESSAGE_FIELDS = {"assistant": ("role", "content", "thinking", "tool_calls"),
                   "tool": ("role", "content", "tool_name", "tool_call_id")}  # fmt: skip


def _messages(served: ServedModel, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts messages to OpenAI's format."""
    messages, num_calls, last_calls = [], 0, list[tuple[str, str]]()
    for index, message in enumerate(given):
        name = f"messages[{index}]"
        role = message.get("role")
        known = _MESSAGE_FIELDS.get(role, ("role", "content")) if isinstance(role, str) else ("role", "content")
        # clients send empty fields with all messages
        empty = {"tool_calls": ([],), "thinking": ("",), "tool_name": ("",), "tool_call_id": ("",), "images": ([],)}
        check_fields(message, name, known, empty)
        for field, value in message.items():
            if field in ("content", "thinking", "tool_name") and not isinstance(value, str | None):
                raise bad_request(f"{name}.{field} is no text; give a string", f"{name}.{field}")
        text = message.get("content") or ""
        if role == "assistant":
            calls = []
            for id, called, arguments in _calls(message.get("tool_calls") or [], name):
                num_calls += 1
                # 9 characters, which Mistral's templates demand
                calls.append((id or f"{num_calls:09d}", called, arguments))
            last_calls = [(id, called) for id, called, _ in calls]
            messages.append(assistant_message(served, text, message.get("thinking") or "", calls))
        elif role == "tool":
            wanted, own_id = message.get("tool_name") or None, message.get("tool_call_id") or None
            found = next((call for call in last_calls if wanted in (None, call[1]) and own_id in (None, call[0])), None)
            if found is not None:
                last_calls.remove(found)
            own = {"role": "tool", "content": text, "name": wanted or (found[1] if found else None)}
            messages.append(own | {"tool_call_id": own_id or (found[0] if found else None)})
        else:
            messages.append({"role": role, "content": text})
    return messages


def _calls(given: Any, name: str) -> list[tuple[str, str, str]]:
    """Ids (empty if not given), names and arguments of calls."""
    shape = 'give [{"function": {"name": ..., "arguments": {...}}}]'
    found = []
    for index, call in enumerate(given if isinstance(given, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{name}.tool_calls is no list of calls; {shape}", f"{name}.tool_calls")
        check_fields(call, f"{name}.tool_calls[{index}]", ("id", "function"), {"type": ("function",)})
        # index: of a call in its answer, the same as in the list
        check_fields(function, f"{name}.tool_calls[{index}].function", ("name", "arguments", "index"))
        if not isinstance(id := call.get("id") or "", str):
            raise bad_request(f"{name}.tool_calls[{index}].id is no text; give a string", f"{name}.tool_calls")
        if not isinstance(arguments := function.get("arguments") or {}, dict):
            raise bad_request(f"{name}.tool_calls has arguments that are no object; {shape}", f"{name}.tool_calls")
        found.append((id, function["name"], json.dumps(arguments, ensure_ascii=False)))
    return found


class _Answer:
    """Writes the answer of one request, for both routes."""

    def __init__(self, request: Request, body: OllamaFields) -> None:
        self.request = request
        self.streams = body.stream is not False
        self.is_chat = isinstance(body, OllamaChatRequest)
        self.model = body.model
        self.began = time.monotonic()

    async def respond(self, conversation: ChatConversation) -> Response | StreamingResponse:
        run = await start_chat(self.request, conversation, stream=self.streams)
        if self.streams:
            return StreamingResponse(self.lines(run), JSON_LINES)
        with run:
            (answer,) = await run.answers()
            blocks = blocks_of(answer)
            return json_response(self.end(self.chunk(blocks), run, answer.finish_reason))

    def loaded(self) -> Response:
        """The answer to a request without a prompt, with which clients load a model."""
        chunk = self.chunk([])
        chunk.done, chunk.done_reason = True, "load"
        return Response(json_line(chunk), media_type=JSON_LINES.media_type if self.streams else JSON)

    async def lines(self, run: ChatRun) -> AsyncIterator[bytes]:
        blocks = AnswerBlocks()
        with run:
            async for parts in run:
                for part in parts:
                    events = [*blocks.feed(part.events), *(blocks.end() if part.finish_reason else ())]
                    if new := [block for each in events if (block := _new_block(each)) is not None]:
                        yield json_line(self.chunk(new))
                    if part.finish_reason is not None:
                        yield json_line(self.end(self.chunk([]), run, part.finish_reason))

    def chunk(self, blocks: list[Block]) -> OllamaChatResponse | OllamaGenerateResponse:
        texts = {"text": "", "reasoning": ""}
        calls = []
        for block in blocks:
            if block.kind != "call":
                texts[block.kind] += block.text
            elif (arguments := call_arguments(block.text)) is not None:
                calls.append(OllamaToolCall(OllamaFunction(block.name, arguments)))
            else:  # the format has objects only: text that is none is not lost
                texts["text"] += block.text
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        thinking = texts["reasoning"] or None
        if not self.is_chat:
            return OllamaGenerateResponse(self.model, now, response=texts["text"], thinking=thinking)
        message = OllamaMessage("assistant", texts["text"], thinking, calls or None)
        return OllamaChatResponse(self.model, now, message=message)

    def end(self, chunk: Any, run: ChatRun, reason: str | None) -> Any:
        """Adds what the last chunk has."""
        now = time.monotonic()
        first = run.state.metrics.first_token_ts or now
        chunk.done, chunk.done_reason = True, "stop" if reason == "tool_calls" else reason
        chunk.prompt_eval_duration, chunk.eval_duration = int((first - self.began) * 1e9), int((now - first) * 1e9)
        chunk.total_duration, chunk.load_duration = chunk.prompt_eval_duration + chunk.eval_duration, 0
        chunk.prompt_eval_count, chunk.eval_count = len(run.state.message.prompt_token_ids), run.state.num_tokens
        return chunk


def _new_block(event: BlockEvent) -> Block | None:
    """The block that an event adds to a line. A call is sent when it is whole."""
    kind = event.block.kind
    if isinstance(event, BlockDelta):
        return None if kind == "call" else Block(kind, 0, event.text)
    return event.block if isinstance(event, BlockEnd) and kind == "call" else None


_OLLAMA: dict[str, Any] = dict(any_content_type=True)

ROUTES = [
    post("/api/chat", create_chat, "Ollama: the next message of a conversation", OllamaChatRequest,
         response_model=OllamaChatResponse, **_OLLAMA),
    post("/api/generate", create_generate, "Ollama: the answer to a prompt", OllamaGenerateRequest,
         response_model=OllamaGenerateResponse, **_OLLAMA),
]  # fmt: skip


# PlainConversation: a prompt without a chat template, for `raw` of /api/generate and models without a template.


class PlainConversation(ChatConversation, kw_only=True):
    """The content of its only message is the whole prompt."""

    def render(self) -> str:
        (message,) = self.messages
        text: str = message["content"]
        return text
