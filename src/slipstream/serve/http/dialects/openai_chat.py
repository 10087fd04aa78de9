"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.base.typed import doc, unsupported
from slipstream.front.prompts import AnswerPieces
from slipstream.front.results import Logprob
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.parsers.reader import ArgumentsDelta, ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart
from slipstream.serve.http.generation.beam import beam_params, beam_samples, beam_usage, given_with_beams, search_beams
from slipstream.serve.http.generation.chat_run import ChatAnswer, ChatPart, ChatRun, start_chat, text_of
from slipstream.serve.http.generation.conversation import AllowControlTokens, ChatConversation, read_messages
from slipstream.serve.http.generation.dialect import thinking_variables
from slipstream.serve.http.generation.fields import GenerationFields, given_fields, sampling_params
from slipstream.serve.http.generation.generation import (
    ChatLogprobs,
    PromptLogprob,
    TokenNames,
    Usage,
    chat_logprobs,
    check_room,
    prompt_logprobs,
    token_ids,
    usage_of,
)
from slipstream.serve.http.generation.tools import ToolChoice, Tools
from slipstream.serve.http.server.errors import bad_request
from slipstream.serve.http.server.request import Request, post
from slipstream.serve.http.server.response import (
    DONE,
    Parts,
    Response,
    StreamingResponse,
    event,
    join_events,
    large_response,
)

# The bodies of POST /v1/chat/completions: request, response and chunks of a stream.


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("variables of the chat template")] = None
    allow_control_tokens: AllowControlTokens = None

    tools: Annotated[list[Any] | None, doc("functions that the model can call")] = None
    tool_choice: Annotated[ToolChoice | None, doc("demanded calls are by a grammar")] = None
    parallel_tool_calls: Annotated[bool | None, doc("false: at most one call")] = None
    include_reasoning: Annotated[bool | None, doc("false: leave the reasoning out of the answer")] = None
    reasoning_effort: Annotated[
        str | None, doc("passed to the chat template; none: as enable_thinking false, where the template has that")
    ] = None
    enable_thinking: Annotated[bool | None, doc("passed to the chat template")] = None

    functions: Annotated[Any, unsupported("use tools and tool_choice", [])] = None
    function_call: Annotated[Any, unsupported("use tools and tool_choice", "none")] = None
    modalities: Annotated[Any, unsupported("the model reads and writes text only", ["text"])] = None
    audio: Annotated[Any, unsupported("the model reads and writes text only")] = None
    prediction: Annotated[Any, unsupported("predicted outputs are not supported")] = None
    web_search_options: Annotated[Any, unsupported("the server has no access to the web")] = None
    verbosity: Annotated[Any, unsupported("ask for it in the messages", "medium")] = None
    store: Annotated[Any, unsupported("the server stores nothing", False)] = None
    moderation: Annotated[Any, unsupported("the server has no moderation")] = None
    echo: Annotated[Any, unsupported("only /v1/completions has echo", False)] = None
    chat_template: Annotated[
        Any, unsupported("a request cannot have a template; start the server with --chat-template")
    ] = None
    documents: Annotated[Any, unsupported("put them into the messages", [])] = None
    mm_processor_kwargs: Annotated[Any, unsupported("the model reads and writes text only", {})] = None
    media_io_kwargs: Annotated[Any, unsupported("the model reads and writes text only", {})] = None


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


async def create_chat_completion(request: Request, body: ChatRequest) -> Response | StreamingResponse:
    pieces = request.state.pieces
    if body.use_beam_search:
        return await large_response(pieces, await _beams(request, body))
    conversation = _conversation(request, body, given_fields(body))
    run = await start_chat(request, conversation, stream=bool(body.stream), shows_ids=bool(body.return_token_ids))
    answer = _Answer(request, body, conversation)
    if body.stream:
        return StreamingResponse(answer.events(run, pieces))
    with run:
        response = answer.whole(await run.answers(), usage_of([run.state]))
        answer.add_prompt_data(response, run.state.message.prompt_token_ids, run.state.prompt_logprobs)
        return await large_response(pieces, response)


async def _beams(request: Request, body: ChatRequest) -> ChatResponse:
    conversation = _conversation(request, body, given_with_beams(body, FIELDS))
    answers, prompt, usage = await search_chat(request, body, conversation)
    answer = _Answer(request, body, conversation)
    response = answer.whole(answers, usage)
    answer.add_prompt_data(response, prompt, None)
    return response


def _conversation(request: Request, body: ChatRequest, given: dict[str, Any]) -> ChatConversation:
    """Checks the request. `given`: its fields that are not null."""
    served = request.choose_model(body.model, "generate")
    messages = read_messages(request, body.messages, served.tokenizer)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true; set it, or remove top_logprobs", "top_logprobs")
    request.field_names["logprobs"] = "top_logprobs"
    request.check_count(len(body.tools or ()), "tools")
    tools = Tools.of_chat(body.tools, body.tool_choice, body.parallel_tool_calls)
    limit = _max_tokens(request, body)
    own: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    own["max_tokens"] = limit if limit is not None else served.description.defaults.params.get("max_tokens")
    params = sampling_params(given, served.inputs, request.state.settings, own, request.field_names)
    request.check_samples(1, params.n)
    return ChatConversation(
        model=served,
        messages=messages,
        params=params,
        max_tokens=limit,
        tools=tools,
        include_reasoning=body.include_reasoning is not False,
        chat_template_kwargs=_template_variables(served, body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=body.add_special_tokens is True,  # by default the template adds them
        allow_control_tokens=body.allow_control_tokens,
        skip_special_tokens=body.skip_special_tokens,
    )


def _max_tokens(request: Request, body: ChatRequest) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise bad_request(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}, two names of one "
            "parameter; remove one",
            "max_tokens",
        )
    request.field_names["max_tokens"] = "max_completion_tokens"
    return body.max_completion_tokens


def _template_variables(served: ServedModel, body: ChatRequest) -> dict[str, Any]:
    thinking = thinking_variables(served, body.enable_thinking, body.reasoning_effort)
    return {**thinking, **(body.chat_template_kwargs or {})}


class _Answer:
    """Writes the answer of one request."""

    def __init__(self, request: Request, body: ChatRequest, conversation: ChatConversation) -> None:
        self.body = body
        self.params = conversation.params
        self.names = TokenNames(conversation.model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self.id, self.created = f"chatcmpl-{request.id}", int(time.time())
        self.model = conversation.model.description.name

    def whole(self, answers: list[ChatAnswer], usage: Usage) -> ChatResponse:
        choices = []
        for answer in answers:
            sample = answer.sample
            choice = ChatChoice(sample.index, _message(answer))
            if sample.logprobs is not None and self.body.logprobs:
                choice.logprobs = self.logprobs(sample.token_ids, sample.logprobs)
            choice.finish_reason, choice.stop_reason = answer.finish_reason, sample.stop_reason
            if self.body.return_token_ids:
                choice.token_ids = token_ids(sample.token_ids)
            choices.append(choice)
        return ChatResponse(self.id, "chat.completion", self.created, self.model, choices, usage)

    def add_prompt_data(
        self, answer: ChatResponse | ChatChunk, ids: list[int], entries: Sequence[dict[int, Logprob] | None] | None
    ) -> None:
        """Adds the requested logprobs and token ids of the prompt."""
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(entries or [])
        if self.body.return_token_ids:
            answer.prompt_token_ids = token_ids(ids)

    async def events(self, run: ChatRun, pieces: AnswerPieces) -> AsyncIterator[Parts]:
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        each = wants_usage and options is not None and bool(options.continuous_usage_stats)
        body, started = self.body, set[int]()
        has_lists = bool(body.logprobs or body.return_token_ids or body.prompt_logprobs is not None)
        with run:
            async for parts in run:
                usage = usage_of([run.state]) if each else None if wants_usage else msgspec.UNSET
                chunks: list[ChatChunk] = []
                for part in parts:
                    index = part.new.index
                    if index not in started:
                        first = self.chunk([ChatChunkChoice(index, ChatDelta("assistant", ""))], usage)
                        if not started:
                            state = run.state
                            self.add_prompt_data(first, state.message.prompt_token_ids, state.prompt_logprobs)
                        started.add(index)
                        chunks.append(first)
                    if (choice := self.choice(part)) is not None:
                        chunks.append(self.chunk([choice], usage))
                if chunks:
                    yield await join_events(pieces, chunks, has_lists=has_lists)
            if wants_usage:
                yield event(self.chunk([], usage_of([run.state])))
            yield DONE

    def choice(self, part: ChatPart) -> ChatChunkChoice | None:
        """The chunk of a part; None if there is nothing to send yet."""
        new = part.new
        choice = ChatChunkChoice(new.index, _delta(part.events))
        if new.logprobs is not None and self.body.logprobs:
            choice.logprobs = self.logprobs(new.token_ids, new.logprobs)
        if new.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = part.finish_reason, new.stop_reason
        if self.body.return_token_ids:
            choice.token_ids = token_ids(new.token_ids)
        is_empty = not part.events and new.finish_reason is None
        return None if is_empty and choice.logprobs is None and not self.body.return_token_ids else choice

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, choices, usage)

    def logprobs(self, ids: list[int], entries: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        return chat_logprobs(ids, entries, self.body.top_logprobs or 0, self.names, self.params.requested_ids)


def _message(answer: ChatAnswer) -> ChatMessage:
    calls = [block for block in answer.blocks if block.kind == "call"]
    reasoning = text_of(answer.blocks, "reasoning")
    message = ChatMessage("assistant", text_of(answer.blocks, "text") or (None if calls or reasoning else ""))
    if reasoning:
        message.reasoning = message.reasoning_content = reasoning
    if calls:
        message.tool_calls = [
            MessageToolCall(call.id, "function", FunctionCall(call.name, call.text)) for call in calls
        ]
    return message


def _delta(events: list[ParserEvent]) -> ChatDelta:
    """All events of one part in one delta."""
    delta, calls = ChatDelta(), list[ToolCallDelta]()
    for each in events:
        match each:
            case ContentDelta(text):
                delta.content = (delta.content or "") + text
            case ReasoningDelta(text):
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
            case ToolCallStart(index, name, id):
                calls.append(ToolCallDelta(index, id, "function", FunctionCallDelta(name, "")))
            case ArgumentsDelta(index, text):
                if not calls or calls[-1].index != index:
                    calls.append(ToolCallDelta(index, function=FunctionCallDelta()))
                function = calls[-1].function
                assert function is not None
                function.arguments = (function.arguments or "") + text
    delta.tool_calls = calls or None
    return delta


ROUTES = [
    post(
        "/v1/chat/completions",
        create_chat_completion,
        "Generate the next message of a conversation",
        ChatRequest,
        response_model=ChatResponse,
    ),
]


# Beam search of POST /v1/chat/completions: each beam is parsed as a sample is, into content, reasoning and calls.

FIELDS = {
    "messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "allow_control_tokens", "tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort",
    "enable_thinking",
}  # fmt: skip
"""Fields of chat that beam search has, besides those of both routes."""


async def search_chat(
    request: Request, body: ChatRequest, conversation: ChatConversation
) -> tuple[list[ChatAnswer], list[int], Usage]:
    """The answers, the best first, the token ids of the prompt, and the usage."""
    run, served = ChatRun(request, conversation), conversation.model
    ((message, _),) = await request.state.encode(1, conversation.num_chars, run.prepare, request.caller)
    check_room(request, served.description.name, message, conversation.max_tokens)
    prompt, prepared = message.prompt_token_ids, message.params
    assert isinstance(prepared, SamplingParams)
    room = served.description.max_model_len - len(prompt)
    limit = room if conversation.params.max_tokens is None else min(room, conversation.params.max_tokens)
    params = beam_params(request, body, limit, prepared.structured_outputs)
    (search,) = await search_beams(request, body, served, [prompt], params)
    answers = [run.answer(sample) for sample in beam_samples(search, prepared, served)]
    return answers, prompt, beam_usage([search])
