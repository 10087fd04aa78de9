"""Cohere's POST /v2/chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from slipstream.base.typed import Fields, unsupported
from slipstream.front.pooling_calls import encode
from slipstream.front.served import ServedModel
from slipstream.params.pooling import PoolingParams
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
    chat_params,
    json_shape,
    think_variables,
    thinking_budget,
)
from slipstream.serve.http.generation.fields import check_fields
from slipstream.serve.http.generation.tools import Tools
from slipstream.serve.http.pooling.embeddings import written
from slipstream.serve.http.pooling.run import Chosen, arrays_of, choose, run, size_of, usage_of
from slipstream.serve.http.server.error_formats import COHERE_EVENTS
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import (
    DONE,
    JsonList,
    Response,
    StreamingResponse,
    json_response,
    large_response,
    named_event,
)

# The bodies of Cohere's POST /v2/chat.


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class CohereChatRequest(Fields, kw_only=True):
    model: str
    messages: list[dict[str, Any]]
    stream: bool | None = None
    tools: Annotated[list[Any] | None, _doc("functions that the model can call")] = None
    strict_tools: Annotated[bool | None, _doc("arguments must match the schemas of the tools")] = None
    tool_choice: Annotated[Literal["REQUIRED", "NONE"] | None, _doc("default: the model decides")] = None
    response_format: Annotated[dict[str, Any] | None, _doc("type text or json_object, with json_schema")] = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: Annotated[int | None, _doc("keep this many most likely tokens; 0: all")] = None
    p: Annotated[float | None, _doc("keep the smallest set of tokens whose probabilities sum to this")] = None
    thinking: Annotated[dict[str, Any] | None, _doc("type enabled or disabled, token_budget")] = None
    priority: Annotated[int | None, _doc("lower values are scheduled first")] = None
    documents: Annotated[Any, unsupported("put them into the messages", [])] = None
    citation_options: Annotated[
        Any, unsupported("answers have no citations", {"mode": "OFF"}, {"mode": "off"}, {"mode": "DISABLED"})
    ] = None
    safety_mode: Annotated[Any, unsupported("put instructions into the system message", "OFF", "NONE")] = None
    logprobs: Annotated[Any, unsupported("use /v1/chat/completions", False)] = None
    raw_prompting: Annotated[Any, unsupported("use /v1/completions", False)] = None


class CohereFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CohereToolCall(msgspec.Struct, omit_defaults=True):
    function: CohereFunction
    id: str | None = None
    type: str | None = None


class CohereContent(msgspec.Struct, omit_defaults=True):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None


class CohereMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: list[CohereContent] | None = None
    tool_plan: str | None = None
    tool_calls: list[CohereToolCall] | None = None


class CohereTokens(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class CohereUsage(msgspec.Struct):
    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int


class CohereChatResponse(msgspec.Struct):
    id: str
    finish_reason: str
    message: CohereMessage
    usage: CohereUsage


async def create_cohere_chat(request: Request, body: CohereChatRequest) -> Response | StreamingResponse:
    run = await start_chat(request, _conversation(request, body), stream=bool(body.stream))
    if body.stream:
        return StreamingResponse(_events(request, run), COHERE_EVENTS)
    with run:
        (answer,) = await run.answers()
        blocks, message = blocks_of(answer), CohereMessage("assistant")
        message.tool_calls = [_call(block) for block in blocks if block.kind == "call"] or None
        if message.tool_calls is not None:  # text beside calls is their plan
            message.tool_plan = answer.content or None
            blocks = [block for block in blocks if block.kind == "reasoning"]
        message.content = [_content(block) for block in blocks if block.kind != "call"] or None
        reason = _reason(answer.finish_reason, answer.sample.stop_reason)
        return json_response(CohereChatResponse(request.id, reason, message, _usage(run)))


def _conversation(request: Request, body: CohereChatRequest) -> ChatConversation:
    served = request.choose_model(body.model, "generate")
    messages = text_messages(request, _messages(served, body.messages), served.tokenizer)
    variables, budget = _thinking(served, body.thinking)
    given = {
        "temperature": body.temperature, "seed": body.seed, "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty, "top_k": body.k, "top_p": body.p, "stop": body.stop_sequences,
        "priority": body.priority, "response_format": _response_format(body.response_format), **budget,
    }  # fmt: skip
    names = {"top_k": "k", "top_p": "p", "stop": "stop_sequences", "response_format": "response_format"}
    params = chat_params(request, served, given, body.max_tokens, names | {"thinking_token_budget": "thinking"})
    return ChatConversation(
        model=served,
        messages=messages,
        params=params,
        max_tokens=body.max_tokens,
        tools=_tools(request, body),
        chat_template_kwargs=variables,
    )


def _tools(request: Request, body: CohereChatRequest) -> Tools:
    request.check_count(len(body.tools or ()), "tools")
    tools = list(body.tools or [])
    if body.strict_tools:
        if not tools:
            raise bad_request("strict_tools needs tools; give some, or remove it", "strict_tools")
        for index, tool in enumerate(tools):
            if isinstance(tool, dict) and isinstance(function := tool.get("function"), dict):
                tools[index] = {**tool, "function": {**function, "strict": True}}
    choice = None if body.tool_choice is None else body.tool_choice.lower()
    return Tools.check(tools, choice, None)


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    name, schema = "response_format", given.get("json_schema", given.get("schema"))
    if given.get("type") not in ("text", "json_object"):
        raise bad_request(f"{name} is {given!r:.100}; give type text or json_object, and json_schema", name)
    if given["type"] == "text":
        check_fields(given, name, ("type",))
        return None
    check_fields(given, name, ("type", "json_schema", "schema"))
    if not isinstance(schema, dict | None):
        raise bad_request(f"{name}.json_schema is no object; give a JSON schema", name)
    return json_shape(schema)


def _thinking(served: ServedModel, given: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    if given is None:
        return {}, {}
    if given.get("type") not in ("enabled", "disabled"):
        raise bad_request(f"thinking is {given!r:.100}; give type enabled or disabled", "thinking")
    check_fields(given, "thinking", ("type", "token_budget"))
    if given["type"] == "disabled" and given.get("token_budget") is not None:
        raise bad_request("thinking.token_budget needs type enabled, and it is disabled; remove one", "thinking")
    variables = think_variables(served, given["type"] == "enabled", "thinking")
    return variables, thinking_budget(given.get("token_budget"), "thinking")


_MESSAGE_FIELDS = {"assistant": ("role", "content", "tool_calls", "tool_plan"),
                   "tool": ("role", "content", "tool_call_id")}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {"citations": ([],)}


def _messages(served: ServedModel, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = []
    for index, message in enumerate(given):
        name = f"messages[{index}]"
        role = message.get("role")
        known = _MESSAGE_FIELDS.get(role, ("role", "content")) if isinstance(role, str) else ("role", "content")
        check_fields(message, name, known, _NEUTRAL)
        content, kinds = message.get("content"), _PARTS if role == "assistant" else _PARTS[:2]
        if content is None and role != "assistant":
            raise bad_request(f"{name}.content is missing; give a text or a list of parts", f"{name}.content")
        text, reasoning = _texts(content, f"{name}.content", kinds)
        if role == "assistant":
            calls = _calls(message.get("tool_calls") or [], f"{name}.tool_calls")
            plan = message.get("tool_plan") or ""
            if not isinstance(plan, str):
                raise bad_request(f"{name}.tool_plan is no text; give a string", f"{name}.tool_plan")
            messages.append(assistant_message(served, "\n".join(filter(None, (plan, text))), reasoning, calls))
        elif role == "tool":
            messages.append({"role": role, "content": text, "tool_call_id": message.get("tool_call_id")})
        else:
            messages.append({"role": role, "content": text})
    return messages


_PARTS = ("text", "document", "thinking")  # each has its type as the name of its field; the last of assistants only


def _texts(content: Any, name: str, kinds: tuple[str, ...]) -> tuple[str, str]:
    """The text and the reasoning of a message's content."""
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        raise bad_request(f"{name} must be a text or a list of parts", name)
    texts, reasoning = [], ""
    for index, part in enumerate(content):
        kind, path = part.get("type") if isinstance(part, dict) else None, f"{name}[{index}]"
        if kind not in kinds:
            fact = f"{path} is a part of type {kind!r:.50}, which is not supported here"
            raise bad_request(f"{fact}; give {', '.join(kinds)}", path, "unsupported_content")
        check_fields(part, path, ("type", kind))
        value, path = part.get(kind), f"{path}.{kind}"
        if kind == "document":
            texts.append(_document(value, path))
        elif not isinstance(value, str):
            raise bad_request(f"{path} is missing or no text; give a string", path)
        elif kind == "text":
            texts.append(value)
        else:
            reasoning += value
    return "\n".join(texts), reasoning


def _document(given: Any, path: str) -> str:
    """The data of a document as text. Its id is for citations, which answers do not have."""
    if not isinstance(given, dict):
        raise bad_request(f'{path} is no document; give {{"data": ...}}', path)
    check_fields(given, path, ("data", "id"))
    data = given.get("data")
    if not isinstance(data, str | dict):
        raise bad_request(f"{path}.data is missing; give a text or an object", f"{path}.data")
    return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)


def _calls(given: Any, name: str) -> list[tuple[str, str, str]]:
    shape = 'give [{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}]'
    found = []
    for index, call in enumerate(given if isinstance(given, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise bad_request(f"{name} is no list of calls; {shape}", name)
        check_fields(call, f"{name}[{index}]", ("id", "function"), {"type": ("function",)})
        check_fields(function, f"{name}[{index}].function", ("name", "arguments"))
        values = call.get("id"), function.get("name"), function.get("arguments")
        if not all(isinstance(value, str) for value in values):
            raise bad_request(f"{name} has a call without id, name or arguments; {shape}", name)
        found.append((str(values[0]), str(values[1]), str(values[2])))
    return found


async def _events(request: Request, run: ChatRun) -> AsyncIterator[bytes]:
    blocks, has_begun = AnswerBlocks(), False
    with run:
        async for parts in run:
            chunks = []
            for part in parts:
                if not has_begun:
                    has_begun = True
                    empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
                    chunks.append(_event("message-start", id=request.id, delta={"message": empty}))
                events = [*blocks.feed(part.events), *(blocks.end() if part.finish_reason else ())]
                chunks += [_block_event(each) for each in events]
                if part.finish_reason is not None:
                    reason = _reason(part.finish_reason, part.new.stop_reason)
                    delta = {"finish_reason": reason, "usage": _usage(run)}
                    chunks.append(_event("message-end", id=request.id, delta=delta))
            if chunks:
                yield b"".join(chunks)
        yield DONE


def _block_event(event: BlockEvent) -> bytes:
    block, index = event.block, event.block.own_index  # contents and calls are two lists of the message
    family = "tool-call" if block.kind == "call" else "content"
    if isinstance(event, BlockStart):
        empty = Block(block.kind, index, "", block.name, block.id)
        content: Any = _call(empty) if block.kind == "call" else _content(empty)
        key = "tool_calls" if block.kind == "call" else "content"
        return _event(f"{family}-start", index=index, delta={"message": {key: content}})
    if isinstance(event, BlockDelta):
        if block.kind == "call":
            delta: dict[str, Any] = {"tool_calls": {"function": {"arguments": event.text}}}
        else:
            delta = {"content": {"text" if block.kind == "text" else "thinking": event.text}}
        return _event(f"{family}-delta", index=index, delta={"message": delta})
    return _event(f"{family}-end", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _content(block: Block) -> CohereContent:
    if block.kind == "reasoning":
        return CohereContent("thinking", thinking=block.text)
    return CohereContent("text", text=block.text)


def _call(block: Block) -> CohereToolCall:
    return CohereToolCall(CohereFunction(block.name, block.text), block.id, "function")


def _reason(reason: str | None, stopped_by: int | str | None) -> str:
    if reason == "stop" and isinstance(stopped_by, str):
        return "STOP_SEQUENCE"
    return {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}.get(reason or "", "ERROR")


def _usage(run: ChatRun) -> CohereUsage:
    state = run.state
    tokens = CohereTokens(len(state.message.prompt_token_ids), state.num_tokens)
    return CohereUsage(tokens, tokens, state.num_cached)


ROUTES = [
    post("/v2/chat", create_cohere_chat, "Cohere: the next message of a conversation", CohereChatRequest,
         response_model=CohereChatResponse),
]  # fmt: skip


# Cohere's POST /v2/embed.

EmbeddingType = Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]


class CohereEmbedRequest(Fields, kw_only=True):
    model: str
    texts: list[str] | None = None
    input_type: Annotated[
        Literal["search_document", "search_query", "classification", "clustering"] | None,
        _doc("selects the model's prompt of that kind, where it has one"),
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None, _doc("float (the default), base64, binary or ubinary; int8 and uint8 are refused")
    ] = None
    output_dimension: Annotated[int | None, _doc("truncate vectors to this size (Matryoshka)")] = None
    max_tokens: Annotated[int | None, _doc("truncate longer texts")] = None
    truncate: Annotated[Literal["NONE", "START", "END"] | None, _doc("the end at which long texts are cut")] = None
    priority: Annotated[int | None, _doc("lower values are scheduled first")] = None
    images: Annotated[Any, unsupported("models read text only", [])] = None
    inputs: Annotated[Any, unsupported("give texts", [])] = None


_PROMPTS = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "search_document"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}  # names of prompts, by the kind of input


class CohereVectors(msgspec.Struct, rename={"float_": "float"}, omit_defaults=True):
    float_: list[list[float]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereApiVersion(msgspec.Struct):
    version: str


class CohereEmbedMeta(msgspec.Struct):
    api_version: CohereApiVersion
    billed_units: dict[str, int]


class CohereEmbedResponse(msgspec.Struct):
    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereEmbedMeta
    response_type: str = "embeddings_by_type"


async def create_cohere_embed(request: Request, body: CohereEmbedRequest) -> Response:
    request.set_input_field("texts")
    request.field_names["dimensions"] = "output_dimension"
    if not body.texts:
        raise bad_request("there are no texts; give a list of them", "texts", "empty")
    request.check_count(len(body.texts), "texts")
    kinds = list(dict.fromkeys(body.embedding_types or ["float"]))
    for kind in kinds:
        if kind in ("int8", "uint8"):
            fact = f"embedding_types has {kind}, whose scale depends on Cohere's own models"
            raise bad_request(f"{fact}; give float, base64, binary or ubinary", "embedding_types")
    chosen = choose(request, body.model, "embed")
    params = PoolingParams(task="embed", **_own(body, chosen))
    name = _prompt_name(chosen, body.input_type)
    found, _ = await run(
        request, chosen, encode(chosen.inputs, list(body.texts), params, "embed", prompt_name=name), size_of(body.texts)
    )
    vectors = CohereVectors()
    arrays = arrays_of(found)
    for kind in kinds:
        setattr(vectors, "float_" if kind == "float" else kind, _written(arrays, kind))
    meta = CohereEmbedMeta(CohereApiVersion("2"), {"input_tokens": usage_of(found).prompt_tokens})
    return await large_response(
        request.state.pieces, CohereEmbedResponse(f"embed-{request.id}", vectors, body.texts, meta)
    )


def _own(body: CohereEmbedRequest, chosen: Chosen) -> dict[str, Any]:
    own: dict[str, Any] = {} if body.output_dimension is None else {"dimensions": body.output_dimension}
    if body.priority is not None:
        own["priority"] = body.priority
    if body.truncate == "NONE":
        if body.max_tokens is not None:
            raise bad_request("max_tokens truncates and truncate is NONE; remove one of them", "max_tokens")
        return own | {"truncation_side": "never"}
    own["truncation_side"] = "left" if body.truncate == "START" else "right"
    if body.max_tokens is not None and body.max_tokens < 1:
        raise bad_request(f"max_tokens is {body.max_tokens}; give 1 or more", "max_tokens")
    limit = chosen.served.max_num_tokens
    own["truncate_prompt_tokens"] = limit if body.max_tokens is None else min(body.max_tokens, limit)
    return own


def _prompt_name(chosen: Chosen, kind: str | None) -> str | None:
    prompts = chosen.inputs.pooling.prompts or {}
    return next((name for name in _PROMPTS.get(kind or "", ()) if name in prompts), None)


def _written(arrays: list[Any], kind: str) -> JsonList:
    if kind in ("float", "base64"):
        return JsonList(written(arrays, kind))
    bits = (np.packbits(np.asarray(array) > 0) for array in arrays)  # one bit per dimension, eight to a number
    return JsonList((each.astype(np.int16) - 128).tolist() if kind == "binary" else each.tolist() for each in bits)


COHERE_EMBED_ROUTES = [
    post("/v2/embed", create_cohere_embed, "Cohere: embed texts", CohereEmbedRequest,
         response_model=CohereEmbedResponse),
]  # fmt: skip
