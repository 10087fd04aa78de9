"""Ollama's POST /api/chat and /api/generate. Streams are JSON lines."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from slipstream.base.typed import InnerFields, doc, unsupported
from slipstream.front.served import ServedModel
from slipstream.serve.http.dialects.ollama_models import OllamaFields, find_model, num_ctx, ollama_params
from slipstream.serve.http.generation.chat_run import Block, BlockDelta, BlockEnd, BlockEvent, ChatRun, Ended, respond
from slipstream.serve.http.generation.conversation import ChatConversation, read_messages
from slipstream.serve.http.generation.dialect import (
    Call,
    assistant_message,
    call_arguments,
    check_own_fields,
    think_variables,
)
from slipstream.serve.http.generation.fields import Label, NoFields
from slipstream.serve.http.generation.tools import Tools
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import JSON, JSON_LINES, Response, StreamingResponse, json_line


class OllamaCalled(InnerFields):
    name: str
    arguments: dict[str, Any] | NoFields | None = None
    index: Label = None  # of a call in its answer, the same as in the list


class OllamaCall(InnerFields):
    function: OllamaCalled
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaTurn(InnerFields, kw_only=True):
    """A message of any role. Clients send empty fields with all of them."""

    role: Any = None
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | Literal[""] | None = None
    tool_name: str | None = None
    tool_call_id: str | int | None = None
    images: Annotated[Any, unsupported("models read text only", [])] = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    messages: list[OllamaTurn] = []
    tools: Annotated[list[Any] | None, doc("functions that the model can call")] = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    prompt: str | None = None
    system: Annotated[str | None, doc("the system message")] = None
    raw: Annotated[bool | None, doc("true: without the chat template")] = None
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
    writer, streams = _Writer(body), body.stream is not False
    if not body.messages:  # clients load a model in this way
        ollama_params(request, served, body)
        return writer.loaded(stream=streams)
    messages = read_messages(request, _messages(served, body.messages), served.tokenizer)
    how = _how(request, served, body)
    request.check_count(len(body.tools or ()), "tools")
    variables = think_variables(served, body.think, "think")
    conversation = ChatConversation(
        messages=messages, tools=Tools.of_chat(body.tools), chat_template_kwargs=variables, **how
    )
    return await respond(request, conversation, writer, stream=streams)


async def create_generate(request: Request, body: OllamaGenerateRequest) -> Response | StreamingResponse:
    request.set_input_field("prompt")
    served = find_model(request, body.model, "generate")
    writer, streams = _Writer(body), body.stream is not False
    how = _how(request, served, body)
    if not body.prompt:
        return writer.loaded(stream=streams)
    messages = [{"role": "user", "content": body.prompt}]
    template = None if served.tokenizer is None else served.tokenizer.chat_template()
    if served.tokenizer is not None and (body.raw or template is None):  # without a tokenizer rendering raises
        for name in ("system", "think"):
            if getattr(body, name):
                raise bad_request(f"{name} needs the chat template; remove it, or raw", name)
        plain = PlainConversation(messages=messages, add_special_tokens=True, **how)
        return await respond(request, plain, writer, stream=streams)
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    variables = think_variables(served, body.think, "think")
    conversation = ChatConversation(messages=messages, chat_template_kwargs=variables, **how)
    return await respond(request, conversation, writer, stream=streams)


def _how(request: Request, served: ServedModel, body: OllamaFields) -> dict[str, Any]:
    """The fields that the conversations of both routes have."""
    params, limit = ollama_params(request, served, body)
    context = num_ctx(body.options, served.description.max_model_len)
    truncates = body.truncate is not False
    return dict(model=served, params=params, max_tokens=limit, max_context=context, truncates=truncates)


_OWN_FIELDS = {"thinking": "assistant", "tool_calls": "assistant", "tool_name": "tool", "tool_call_id": "tool"}


def _messages(served: ServedModel, given: list[OllamaTurn]) -> list[dict[str, Any]]:
    """Converts messages to OpenAI's format."""
    messages, num_calls, last_calls = [], 0, list[Call]()
    for index, message in enumerate(given):
        check_own_fields(message, f"messages[{index}]", _OWN_FIELDS)
        text = message.content or ""
        if message.role == "assistant":
            last_calls = []
            for call in message.tool_calls or ():
                num_calls += 1
                arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
                # 9 characters, which Mistral's templates demand
                last_calls.append((call.id or f"{num_calls:09d}", call.function.name, arguments))
            messages.append(assistant_message(served, text, message.thinking or "", last_calls))
        elif message.role == "tool":
            name, id = message.tool_name or None, message.tool_call_id or None
            found = next((call for call in last_calls if name in (None, call[1]) and id in (None, call[0])), None)
            if found is not None:
                last_calls = [call for call in last_calls if call is not found]
            own = {"name": name or (found[1] if found else None), "tool_call_id": id or (found[0] if found else None)}
            messages.append({"role": "tool", "content": text, **own})
        else:
            messages.append({"role": message.role, "content": text})
    return messages


class _Writer:
    """For both routes."""

    format = JSON_LINES

    def __init__(self, body: OllamaFields) -> None:
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._model = body.model
        self._began = time.monotonic()

    def loaded(self, *, stream: bool) -> Response:
        """The answer to a request without a prompt, with which clients load a model."""
        chunk = self._chunk([])
        chunk.done, chunk.done_reason = True, "load"
        return Response(json_line(chunk), media_type=JSON_LINES.media_type if stream else JSON)

    def begin(self, run: ChatRun) -> bytes:
        return b""

    def events(self, found: list[BlockEvent]) -> bytes:
        new = [block for each in found if (block := _new_block(each)) is not None]
        return json_line(self._chunk(new)) if new else b""

    async def end(self, ended: Ended) -> bytes:
        return json_line(self._last(self._chunk([]), ended))

    async def whole(self, ended: Ended) -> Any:
        return self._last(self._chunk(ended.blocks), ended)

    def _chunk(self, blocks: list[Block]) -> OllamaChatResponse | OllamaGenerateResponse:
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
        if not self._is_chat:
            return OllamaGenerateResponse(self._model, now, response=texts["text"], thinking=thinking)
        message = OllamaMessage("assistant", texts["text"], thinking, calls or None)
        return OllamaChatResponse(self._model, now, message=message)

    def _last(self, chunk: Any, ended: Ended) -> Any:
        """Adds what the last chunk has."""
        state, now = ended.run.state, time.monotonic()
        first = state.metrics.first_token_ts or now
        chunk.done, chunk.done_reason = True, "stop" if ended.reason == "tool_calls" else ended.reason
        chunk.prompt_eval_duration, chunk.eval_duration = int((first - self._began) * 1e9), int((now - first) * 1e9)
        chunk.total_duration, chunk.load_duration = chunk.prompt_eval_duration + chunk.eval_duration, 0
        chunk.prompt_eval_count, chunk.eval_count = len(state.message.prompt_token_ids), state.num_tokens
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
