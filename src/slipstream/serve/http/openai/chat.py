"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.frontend.inputs import PreparedPrompt
from slipstream.frontend.request_state import GenerationRequestState
from slipstream.frontend.request_stream import RequestStream
from slipstream.frontend.results import Increment, Logprob
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.fields import GenerationFields, Refused, given_fields, refuse, sampling_params
from slipstream.serve.http.openai.generation import Usage, check_end, start, submits_for, usage_of
from slipstream.serve.http.openai.logprobs import (
    ChatLogprobs,
    PromptLogprob,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from slipstream.serve.http.openai.messages import AllowControlTokens, message_chars, text_messages
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import DONE, Response, StreamingResponse, event, json_response
from slipstream.serve.http.routes import post


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, msgspec.Meta(description="variables of the template, such as enable_thinking")
    ] = None
    allow_control_tokens: AllowControlTokens = None

    tools: Refused = None
    tool_choice: Refused = None
    parallel_tool_calls: Refused = None
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    store: Refused = None
    moderation: Refused = None
    echo: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    mm_processor_kwargs: Refused = None
    media_io_kwargs: Refused = None
    include_reasoning: Refused = None


_TOOLS = "tool calls are not implemented yet"
_MEDIA = "the model reads and writes text only"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _TOOLS),
    "tool_choice": (("none",), _TOOLS),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none",), _TOOLS),
    "modalities": ((["text"],), _MEDIA),
    "audio": ((), _MEDIA),
    "mm_processor_kwargs": (({},), _MEDIA),
    "media_io_kwargs": (({},), _MEDIA),
    "prediction": ((), "predicted outputs are not supported"),
    "web_search_options": ((), "the server has no access to the web"),
    "reasoning_effort": ((), "use chat_template_kwargs, with the variables of the model's template"),
    "verbosity": (("medium",), "ask for it in the messages"),
    "store": ((False,), "the server stores nothing"),
    "moderation": ((), "the server has no moderation"),
    "echo": ((False,), "only /v1/completions has echo"),
    "chat_template": ((), "a request cannot have a template; start the server with --chat-template"),
    "documents": (([],), "put them into the messages"),
    "include_reasoning": ((True,), "reasoning is part of the text; disable it by chat_template_kwargs"),
}


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


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
    job = _Job(request, body)
    size = message_chars(body.messages)
    request_stream = await start(request, job.model, 1, size, job.submits, stream=bool(body.stream), limit=job.limit)
    if body.stream:
        return StreamingResponse(job.events(request_stream))
    with request_stream:
        (request_state,) = await request_stream.wait()
        return json_response(job.answer(request_state))


class _Job:
    """One request: its checked parameters, and the construction of its response."""

    def __init__(self, request: Request, body: ChatRequest) -> None:
        self.request = request
        self.body = body
        given = given_fields(body)
        refuse(given, _REFUSED)
        served = request.choose_model(body.model, "generate")
        self.inputs = served.inputs
        self.messages = text_messages(request, body.messages, served.tokenizer)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs=true; set it, or remove top_logprobs", "top_logprobs")
        request.field_names["logprobs"] = "top_logprobs"
        limit = body.max_tokens
        if body.max_completion_tokens is not None:
            if limit not in (None, body.max_completion_tokens):
                raise bad_request(
                    f"max_tokens is {limit} and max_completion_tokens {body.max_completion_tokens}, two names of one "
                    "parameter; remove one",
                    "max_tokens",
                )
            limit = body.max_completion_tokens
            request.field_names["max_tokens"] = "max_completion_tokens"
        self.limit = limit
        own: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
        own["max_tokens"] = limit if limit is not None else self.inputs.description.defaults.params.get("max_tokens")
        self.params = sampling_params(given, self.inputs, request.state.settings, own, request.field_names)
        request.check_samples(1, self.params.n)
        self.names = TokenNames(served.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self.id, self.created, self.model = f"chatcmpl-{request.id}", int(time.time()), served.description.name

    def submits(self) -> list[PreparedPrompt]:
        body = self.body
        continues = bool(body.continue_final_message)
        text = self.inputs.render_chat(
            self.messages,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=body.chat_template_kwargs,
            allow_control_tokens=body.allow_control_tokens,
        )
        special = body.add_special_tokens is True  # by default the template adds them
        return submits_for(self.request, self.model, [text], self.params, add_special_tokens=special)

    def answer(self, request_state: GenerationRequestState) -> ChatResponse:
        check_end(request_state)
        choices = []
        for sample in request_state.samples:
            choice = ChatChoice(sample.index, ChatMessage("assistant", sample.text))
            if sample.logprobs is not None and self.body.logprobs:
                choice.logprobs = self.logprobs(sample.token_ids, sample.logprobs)
            choice.finish_reason, choice.stop_reason = sample.finish_reason, sample.stop_reason
            if self.body.return_token_ids:
                choice.token_ids = sample.token_ids
            choices.append(choice)
        usage = usage_of([request_state])
        response = ChatResponse(self.id, "chat.completion", self.created, self.model, choices, usage)
        self.add_prompt_data(response, request_state)
        return response

    def add_prompt_data(self, answer: ChatResponse | ChatChunk, request_state: GenerationRequestState) -> None:
        """Adds the requested logprobs and token ids of the prompt."""
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(request_state.prompt_logprobs or [])
        if self.body.return_token_ids:
            answer.prompt_token_ids = request_state.message.prompt_token_ids

    async def events(self, request_stream: RequestStream[GenerationRequestState]) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        each = wants_usage and options is not None and bool(options.continuous_usage_stats)
        started: set[int] = set()
        (request_state,) = request_stream.states
        with request_stream:
            async for _ in request_stream:
                check_end(request_state)
                usage = usage_of([request_state]) if each else None if wants_usage else msgspec.UNSET
                parts = []
                for new in request_state.increment():
                    if new.index not in started:
                        first = self.chunk([ChatChunkChoice(new.index, ChatDelta("assistant", ""))], usage)
                        if not started:
                            self.add_prompt_data(first, request_state)
                        started.add(new.index)
                        parts.append(event(first))
                    parts.append(event(self.chunk([self.choice(new)], usage)))
                if parts:
                    yield b"".join(parts)
            if wants_usage:
                yield event(self.chunk([], usage_of([request_state])))
            yield DONE

    def choice(self, new: Increment) -> ChatChunkChoice:
        delta = ChatDelta(content=new.text) if new.text or new.finish_reason is None else ChatDelta()
        choice = ChatChunkChoice(new.index, delta)
        if new.logprobs is not None and self.body.logprobs:
            choice.logprobs = self.logprobs(new.token_ids, new.logprobs)
        if new.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = new.finish_reason, new.stop_reason
        if self.body.return_token_ids:
            choice.token_ids = new.token_ids
        return choice

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, choices, usage)

    def logprobs(self, ids: list[int], entries: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        return chat_logprobs(ids, entries, self.body.top_logprobs or 0, self.names, self.params.requested_ids)


ROUTES = [
    post(
        "/v1/chat/completions",
        create_chat_completion,
        "Generate the next message of a conversation",
        ChatRequest,
        response_model=ChatResponse,
    ),
]
