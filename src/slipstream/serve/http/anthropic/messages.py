"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from slipstream.serve.http.anthropic.convert import messages_conversation
from slipstream.serve.http.anthropic.errors import ANTHROPIC_EVENTS, AnthropicErrorBody, as_anthropic_error
from slipstream.serve.http.anthropic.types import (
    REFUSED,
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from slipstream.serve.http.chat.blocks import AnswerBlocks, Block, BlockDelta, BlockEvent, BlockStart, blocks_of
from slipstream.serve.http.chat.chat_run import ChatRun, start_chat
from slipstream.serve.http.chat.dialects import call_arguments
from slipstream.serve.http.chat.tools import Tools
from slipstream.serve.http.openai.fields import given_fields, refuse
from slipstream.serve.http.pooling.tei_tokens import check_chars
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, StreamingResponse, json_response, named_event
from slipstream.serve.http.routes import post


async def create_message(request: Request, body: MessagesRequest) -> Response | StreamingResponse:
    refuse(given_fields(body), REFUSED)
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
    refuse(given_fields(body), REFUSED)
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


_ERRORS: dict[str, Any] = dict(convert_error=as_anthropic_error, error_model=AnthropicErrorBody)

ROUTES = [
    post("/v1/messages", create_message, "Anthropic: the next message", MessagesRequest,
         response_model=MessagesResponse, **_ERRORS),
    post("/v1/messages/count_tokens", count_tokens, "Anthropic: tokens of a prompt", CountTokensRequest,
         response_model=TokenCount, uses_queue=False, **_ERRORS),
]  # fmt: skip
