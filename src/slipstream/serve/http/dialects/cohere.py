"""Cohere's POST /v2/chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from slipstream.base.typed import Fields, InnerFields, doc, unsupported
from slipstream.front.pooling_calls import encode
from slipstream.front.served import ServedModel
from slipstream.params.pooling import PoolingParams
from slipstream.serve.http.generation.chat_run import (
    Block,
    BlockDelta,
    BlockEvent,
    BlockStart,
    ChatRun,
    Ended,
    respond,
    text_of,
)
from slipstream.serve.http.generation.conversation import ChatConversation, read_messages
from slipstream.serve.http.generation.dialect import (
    assistant_message,
    chat_params,
    check_own_fields,
    json_shape,
    thinking_switch,
)
from slipstream.serve.http.generation.fields import Label, NumTokens, TextFormat
from slipstream.serve.http.generation.tools import CalledFunction, Tools
from slipstream.serve.http.pooling.embeddings import written
from slipstream.serve.http.pooling.rerank import ApiVersion
from slipstream.serve.http.pooling.run import Chosen, arrays_of, choose, run, size_of, usage_of
from slipstream.serve.http.server.error_formats import COHERE_EVENTS
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import (
    DONE,
    JsonList,
    Response,
    StreamingResponse,
    large_response,
    named_event,
)

# The request of POST /v2/chat.


class CohereText(InnerFields, tag="text"):
    text: str


class CohereThought(InnerFields, tag="thinking"):
    thinking: str


class CohereDocumentData(InnerFields):
    data: str | dict[str, Any]
    id: Label = None  # for citations, which answers do not have


class CohereDocument(InnerFields, tag="document"):
    document: CohereDocumentData


class CohereCall(InnerFields):
    id: str
    function: CalledFunction
    type: Literal["function"] | None = None


class CohereTurn(InnerFields, kw_only=True):
    """A message of any role."""

    role: Any = None
    content: str | list[CohereText | CohereDocument | CohereThought] | None = None
    tool_calls: list[CohereCall] | None = None
    tool_plan: str | None = None
    tool_call_id: str | int | None = None
    citations: Annotated[Any, unsupported("answers have none; remove it", [])] = None


class CohereJson(InnerFields, tag="json_object"):
    json_schema: dict[str, Any] | None = None
    schema: Annotated[dict[str, Any] | None, doc("older name of json_schema")] = None

    @property
    def shape(self) -> dict[str, Any] | None:
        return self.schema if self.json_schema is None else self.json_schema


class CohereThinking(InnerFields):
    type: Literal["enabled", "disabled"]
    token_budget: Annotated[NumTokens | None, doc("with type enabled")] = None


class CohereChatRequest(Fields, kw_only=True):
    model: str
    messages: list[CohereTurn]
    stream: bool | None = None
    tools: Annotated[list[Any] | None, doc("functions that the model can call")] = None
    strict_tools: Annotated[bool | None, doc("arguments must match the schemas of the tools")] = None
    tool_choice: Annotated[Literal["REQUIRED", "NONE"] | None, doc("default: the model decides")] = None
    response_format: TextFormat | CohereJson | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: Annotated[int | None, doc("keep this many most likely tokens; 0: all")] = None
    p: Annotated[float | None, doc("keep the smallest set of tokens whose probabilities sum to this")] = None
    thinking: CohereThinking | None = None
    priority: Annotated[int | None, doc("lower values are scheduled first")] = None
    documents: Annotated[Any, unsupported("put them into the messages", [])] = None
    citation_options: Annotated[
        Any, unsupported("answers have no citations", {"mode": "OFF"}, {"mode": "off"}, {"mode": "DISABLED"})
    ] = None
    safety_mode: Annotated[Any, unsupported("put instructions into the system message", "OFF", "NONE")] = None
    logprobs: Annotated[Any, unsupported("use /v1/chat/completions", False)] = None
    raw_prompting: Annotated[Any, unsupported("use /v1/completions", False)] = None


# Converts a request to a conversation.


def _conversation(request: Request, body: CohereChatRequest) -> ChatConversation:
    served = request.choose_model(body.model, "generate")
    given_messages = [_message(served, message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    messages = read_messages(request, given_messages, served.tokenizer)
    variables, budget, form = {}, None, body.response_format
    if body.thinking is not None:
        budget = body.thinking.token_budget
        variables = thinking_switch(served, body.thinking.type, budget, "token_budget")
    given = {
        "temperature": body.temperature, "seed": body.seed, "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty, "top_k": body.k, "top_p": body.p, "stop": body.stop_sequences,
        "priority": body.priority, "thinking_token_budget": budget,
        "response_format": json_shape(form.shape) if isinstance(form, CohereJson) else None,
    }  # fmt: skip
    names = {"top_k": "k", "top_p": "p", "stop": "stop_sequences", "thinking_token_budget": "thinking"}
    params = chat_params(request, served, given, body.max_tokens, names)
    request.check_count(len(body.tools or ()), "tools")
    if body.strict_tools and not body.tools:
        raise bad_request("strict_tools needs tools; give some, or remove it", "strict_tools")
    choice = None if body.tool_choice is None else body.tool_choice.lower()
    return ChatConversation(
        model=served,
        messages=messages,
        params=params,
        max_tokens=body.max_tokens,
        tools=Tools.of_chat(body.tools, choice, strict=bool(body.strict_tools)),
        chat_template_kwargs=variables,
    )


_OWN_FIELDS = {"tool_calls": "assistant", "tool_plan": "assistant", "tool_call_id": "tool"}


def _message(served: ServedModel, given: CohereTurn, path: str) -> dict[str, Any]:
    check_own_fields(given, path, _OWN_FIELDS)
    texts, reasoning, content = [], "", given.content
    for index, part in enumerate([CohereText(content)] if isinstance(content, str) else content or ()):
        match part:
            case CohereText(text):
                texts.append(text)
            case CohereDocument(CohereDocumentData(data)):
                texts.append(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))
            case CohereThought(text) if given.role == "assistant":
                reasoning += text
            case _:
                fact = f"{path}.content[{index}] is of type 'thinking', which is for messages of the assistant"
                name = f"{path}.content[{index}].type"
                raise bad_request(f"{fact}; give text, document", name, "unsupported_content")
    if given.role == "assistant":
        calls = [(call.id, call.function.name, call.function.arguments) for call in given.tool_calls or ()]
        text = "\n".join(filter(None, (given.tool_plan, "\n".join(texts))))
        return assistant_message(served, text, reasoning, calls)
    if given.content is None:
        raise bad_request(f"{path}.content is missing; give a text or a list of parts", f"{path}.content")
    own = {"tool_call_id": given.tool_call_id} if given.role == "tool" else {}
    return {"role": given.role, "content": "\n".join(texts), **own}


# The answer, whole or as the events of a stream.


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


class _Writer:
    format = COHERE_EVENTS

    def __init__(self, id: str) -> None:
        self._id = id

    async def whole(self, ended: Ended) -> CohereChatResponse:
        blocks, message = ended.blocks, CohereMessage("assistant")
        message.tool_calls = [_call(block) for block in blocks if block.kind == "call"] or None
        if message.tool_calls is not None:  # text beside calls is their plan
            message.tool_plan = text_of(blocks, "text") or None
            blocks = [block for block in blocks if block.kind == "reasoning"]
        message.content = [_content(block) for block in blocks if block.kind != "call"] or None
        return CohereChatResponse(self._id, _reason(ended), message, _usage(ended.run))

    def begin(self, run: ChatRun) -> bytes:
        empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return _event("message-start", id=self._id, delta={"message": empty})

    def events(self, found: list[BlockEvent]) -> bytes:
        return b"".join(map(_block_event, found))

    async def end(self, ended: Ended) -> bytes:
        delta = {"finish_reason": _reason(ended), "usage": _usage(ended.run)}
        return _event("message-end", id=self._id, delta=delta) + DONE


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


def _reason(ended: Ended) -> str:
    reason = ended.reason or ""
    if reason == "stop" and isinstance(ended.stopped_by, str):
        return "STOP_SEQUENCE"
    return {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}.get(reason, "ERROR")


def _usage(run: ChatRun) -> CohereUsage:
    state = run.state
    tokens = CohereTokens(len(state.message.prompt_token_ids), state.num_tokens)
    return CohereUsage(tokens, tokens, state.num_cached)


async def create_cohere_chat(request: Request, body: CohereChatRequest) -> Response | StreamingResponse:
    return await respond(request, _conversation(request, body), _Writer(request.id), stream=bool(body.stream))


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
        doc("selects the model's prompt of that kind, where it has one"),
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None, doc("float (the default), base64, binary or ubinary; int8 and uint8 are refused")
    ] = None
    output_dimension: Annotated[int | None, doc("truncate vectors to this size (Matryoshka)")] = None
    max_tokens: Annotated[int | None, doc("truncate longer texts")] = None
    truncate: Annotated[Literal["NONE", "START", "END"] | None, doc("the end at which long texts are cut")] = None
    priority: Annotated[int | None, doc("lower values are scheduled first")] = None
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


class CohereEmbedMeta(msgspec.Struct):
    api_version: ApiVersion
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
    meta = CohereEmbedMeta(ApiVersion("2"), {"input_tokens": usage_of(found).prompt_tokens})
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
