"""ChatRun: generates the answers of a ChatConversation, as content, reasoning and tool calls.

Routes of all chat APIs use it: `start_chat`, then `answers` for whole answers or `async for` for parts of a stream.
"""

from __future__ import annotations

import math
import secrets
import string
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

import msgspec

from slipstream.base.errors import PromptTooLong
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.request_state import GenerationRequestState, RequestStream
from slipstream.front.results import Increment
from slipstream.front.sample_state import SampleState
from slipstream.params.sampling import SamplingParams
from slipstream.parsers.output_parser import HarmonyFormat, OutputParser, ReasoningFormat, ToolCallFormat
from slipstream.parsers.reader import ArgumentsDelta, ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart
from slipstream.serve.http.generation.conversation import ChatConversation
from slipstream.serve.http.generation.generation import AnswerSize, check_end, start, submits_for
from slipstream.serve.http.generation.strict import forced_format, structured_outputs
from slipstream.serve.http.generation.tools import ChatFormats
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.request import Request
from slipstream.serve.http.server.response import Response, StreamFormat, StreamingResponse, json_response

_ID_CHARACTERS = string.ascii_letters + string.digits


class ChatAnswer(msgspec.Struct):
    """One sample, whole."""

    sample: SampleState
    blocks: list[Block]
    finish_reason: str | None  # as OpenAI's: tool_calls where the model stopped after calls


class ChatPart(msgspec.Struct):
    """The new part of one sample of a stream."""

    new: Increment
    events: list[ParserEvent]  # every ToolCallStart has an id
    finish_reason: str | None  # as in ChatAnswer


async def start_chat(
    request: Request, conversation: ChatConversation, *, stream: bool, shows_ids: bool = False
) -> ChatRun:
    """Checks, renders and tokenises a conversation, and sends it to the engine. Use the result in a `with` block."""
    run = ChatRun(request, conversation)
    name, size = conversation.model.description.name, conversation.num_chars
    answer = AnswerSize(conversation.params, shows_ids=shows_ids)
    run.stream = await start(
        request, name, 1, size, run.prepare, stream=stream, limit=conversation.max_tokens, answer=answer
    )
    return run


class ChatRun:
    stream: RequestStream[GenerationRequestState]

    def __init__(self, request: Request, conversation: ChatConversation) -> None:
        self._request = request
        self._conversation = conversation
        settings = request.state.settings
        self._formats = ChatFormats.of(conversation.model, settings)
        conversation.check_tool_choice(self._formats, auto=settings.enable_auto_tool_choice)
        self._prompt = ""  # its text, set by `prepare`
        self._parsers: dict[int, OutputParser | None] = {}  # by sample; None: all text is content
        self._call_ids: dict[int, set[str]] = {}  # by sample: those that the model wrote

    @property
    def state(self) -> GenerationRequestState:
        (state,) = self.stream.states
        return state

    def prepare(self) -> list[PreparedPrompt]:
        try:
            return self._prepare()
        except (PromptTooLong, HTTPException) as error:
            if not self._conversation.truncates or error.code != PromptTooLong.code:
                raise
        return self._truncate()

    def _truncate(self) -> list[PreparedPrompt]:
        """The prompt with as many of the last messages as leave room for max_tokens, at most half the context; if one
        alone does not, its end."""
        whole = self._conversation
        context = whole.max_context or whole.model.description.max_model_len
        keep = max(1, context - min(whole.max_tokens or context, context // 2))
        shorter = whole.without_oldest()
        low, high = 0, len(shorter)  # the first that fits is at low or later, and not after high
        while low < high:
            middle = (low + high) // 2
            self._conversation = msgspec.structs.replace(whole, messages=shorter[middle])
            if self._num_tokens() <= keep:
                high = middle
            else:
                low = middle + 1
        chosen = [*shorter, shorter[-1] if shorter else whole.messages][low]
        params = whole.params.with_changes(truncate_prompt_tokens=keep)
        self._conversation = msgspec.structs.replace(whole, messages=chosen, params=params)
        return self._prepare()

    def _num_tokens(self) -> float:
        try:
            return len(self._prepare()[0][0].prompt_token_ids)
        except (PromptTooLong, HTTPException) as error:
            if error.code != PromptTooLong.code:
                raise
            return math.inf

    def _prepare(self) -> list[PreparedPrompt]:
        conversation, formats = self._conversation, self._formats
        text = conversation.render()
        params, tokenizer = conversation.params, conversation.model.tokenizer
        assert tokenizer is not None, "a chat template needs a tokenizer"
        with_tools = bool(conversation.tools.shown)
        if conversation.skip_special_tokens is None and formats.uses_special_tokens(tokenizer, with_tools=with_tools):
            params = params.with_changes(skip_special_tokens=False)
        names = self._request.field_names
        field = names.get("structured_outputs", "structured_outputs")
        if conversation.tools.are_forced or (conversation.tools.strict and params.structured_outputs is None):
            names["structured_outputs"] = "tools"  # errors of the shape are about tools from now on
        shape = structured_outputs(conversation, formats, text, field)
        if shape is not params.structured_outputs:
            params = params.with_changes(structured_outputs=shape)
        name = conversation.model.description.name
        prepared = submits_for(self._request, name, [text], params, add_special_tokens=conversation.add_special_tokens)
        self._prompt = prepared[0][1] or ""
        return prepared if conversation.max_context is None else [self._within_context(each) for each in prepared]

    def _within_context(self, prepared: PreparedPrompt) -> PreparedPrompt:
        """The prompt with an answer that ends at the limit of the context."""
        (message, text), limit = prepared, self._conversation.max_context
        assert limit is not None and isinstance(message.params, SamplingParams)
        if (room := limit - len(message.prompt_token_ids)) < 1:
            fact = f"the prompt has {limit - room} tokens, options.num_ctx is {limit} including the answer"
            raise bad_request(f"{fact}; raise it, or set truncate", "options", "context_length_exceeded")
        wanted = message.params.max_tokens
        params = message.params.with_changes(max_tokens=room if wanted is None else min(wanted, room))
        return msgspec.structs.replace(message, params=params), text

    async def answers(self) -> list[ChatAnswer]:
        """The samples when all are finished. For a run that is no stream."""
        (state,) = await self.stream.wait()
        check_end(self._request, state)
        return [self.answer(sample) for sample in state.samples]

    async def __aiter__(self) -> AsyncIterator[list[ChatPart]]:
        """The parts as they arrive, until all samples are finished."""
        async for (state,) in self.stream:
            check_end(self._request, state)
            yield [self._part(new) for new in state.increment()]

    def answer(self, sample: SampleState) -> ChatAnswer:
        """Parses a sample that is finished."""
        blocks = AnswerBlocks()
        blocks.feed(self._events(sample.index, sample.text, is_last=True))
        return ChatAnswer(sample, blocks.all, self._finish_reason(sample.index, sample.finish_reason))

    def _part(self, new: Increment) -> ChatPart:
        events = self._events(new.index, new.text, is_last=new.finish_reason is not None)
        return ChatPart(new, events, self._finish_reason(new.index, new.finish_reason))

    def _events(self, index: int, text: str, *, is_last: bool) -> list[ParserEvent]:
        if index not in self._parsers:
            self._parsers[index] = self._new_parser()
        if (parser := self._parsers[index]) is None:
            return [ContentDelta(text)] if text else []
        events = [*parser.feed(text), *(parser.finish() if is_last else ())]
        ids = self._call_ids.setdefault(index, set())
        return [kept for event in events if (kept := self._kept(event, ids)) is not None]

    def _kept(self, event: ParserEvent, ids: set[str]) -> ParserEvent | None:
        """The event with the id of a call, which is not among `ids`; None if the request excludes it."""
        match event:
            case ReasoningDelta() if not self._conversation.include_reasoning:
                return None
            case ToolCallStart() | ArgumentsDelta() if event.index and not self._conversation.tools.parallel:
                return None
            case ToolCallStart(index, name, id):
                if not id or id in ids:  # a model may write one twice, and clients find the result of a call by its id
                    return ToolCallStart(index, name, self._new_id())
                ids.add(id)
        return event

    def _new_parser(self) -> OutputParser | None:
        conversation, formats = self._conversation, self._formats
        tools: ToolCallFormat | None = None
        reasoning: ReasoningFormat | HarmonyFormat | None = formats.reasoning
        if conversation.tools.are_forced and not formats.is_harmony:
            tools = forced_format(conversation.tools)
        elif conversation.tools.shown:
            tools = formats.tools
        if reasoning is None and tools is None:
            return None
        is_open = False
        if isinstance(reasoning, ReasoningFormat):
            is_open = reasoning.is_open(self._prompt, continues=conversation.continue_final_message)
        return OutputParser(reasoning, tools, functions=conversation.tools.functions, is_open=is_open)

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        """A forced function ends with stop, as in OpenAI's API."""
        parser = self._parsers[index]
        if reason != "stop" or parser is None or self._conversation.tools.choice == "function":
            return reason
        return "tool_calls" if parser.num_calls else reason

    def _new_id(self) -> str:
        size = 9 if self._formats.has_short_ids else 24
        text = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(size))
        return text if self._formats.has_short_ids else f"call_{text}"

    def __enter__(self) -> ChatRun:
        self.stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.__exit__(kind, error, trace)


# AnswerBlocks: the output of a sample as text, reasoning and tool calls in the order in which the model writes them.
#
# APIs other than OpenAI's chat send such blocks (`respond`), and in a stream their starts, pieces and ends.

BlockKind = Literal["text", "reasoning", "call"]


class Block(msgspec.Struct):
    kind: BlockKind
    index: int
    text: str = ""  # of a call: its arguments, JSON as the model wrote it
    name: str = ""  # of a call
    id: str = ""  # of a call
    own_index: int = 0  # of a call among the calls, of a text or reasoning among those


class BlockStart(msgspec.Struct):
    block: Block


class BlockDelta(msgspec.Struct):
    block: Block
    text: str


class BlockEnd(msgspec.Struct):
    block: Block
    reason: str | None = None  # why the answer ends with this block


BlockEvent = BlockStart | BlockDelta | BlockEnd


class AnswerBlocks:
    """Turns the events of a stream into those of blocks. `all` has the blocks so far, with their text."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._num_calls = 0

    def feed(self, events: Sequence[ParserEvent]) -> list[BlockEvent]:
        found: list[BlockEvent] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    self._add("text", text, found)
                case ReasoningDelta(text):
                    self._add("reasoning", text, found)
                case ToolCallStart(_, name, id):
                    self._start(Block("call", len(self.all), name=name, id=id or ""), found)
                case ArgumentsDelta(_, text):
                    self._add("call", text, found)
        return found

    def end(self, reason: str | None = None) -> list[BlockEvent]:
        """Ends the block that is open, if there is one. `reason`: why the answer ends."""
        if self._open is None:
            return []
        block, self._open = self._open, None
        return [BlockEnd(block, reason)]

    def _start(self, block: Block, found: list[BlockEvent]) -> None:
        found += self.end()
        is_call = block.kind == "call"
        block.own_index = self._num_calls if is_call else block.index - self._num_calls
        self._num_calls += is_call
        self._open = block
        self.all.append(block)
        found.append(BlockStart(block))

    def _add(self, kind: BlockKind, text: str, found: list[BlockEvent]) -> None:
        if self._open is None or self._open.kind != kind:
            self._start(Block(kind, len(self.all)), found)
        assert self._open is not None
        self._open.text += text
        found.append(BlockDelta(self._open, text))


def text_of(blocks: Sequence[Block], kind: BlockKind) -> str:
    """All blocks of a kind together."""
    return "".join([block.text for block in blocks if block.kind == kind])


class Ended(NamedTuple):
    """An answer at its end."""

    run: ChatRun
    blocks: list[Block]
    reason: str | None  # as of ChatAnswer
    stopped_by: int | str | None  # a stop string or a token


class AnswerWriter(Protocol):
    """Writes one answer in the format of an API: whole, or as the events of a stream."""

    format: StreamFormat

    def begin(self, run: ChatRun) -> bytes: ...

    def events(self, found: list[BlockEvent]) -> bytes: ...

    async def end(self, ended: Ended) -> bytes: ...

    async def whole(self, ended: Ended) -> msgspec.Struct: ...


async def respond(
    request: Request, conversation: ChatConversation, writer: AnswerWriter, *, stream: bool
) -> Response | StreamingResponse:
    run = await start_chat(request, conversation, stream=stream)
    if stream:
        return StreamingResponse(_streamed(run, writer), writer.format)
    with run:
        (answer,) = await run.answers()
        ended = Ended(run, answer.blocks, answer.finish_reason, answer.sample.stop_reason)
        return json_response(await writer.whole(ended))


async def _streamed(run: ChatRun, writer: AnswerWriter) -> AsyncIterator[bytes]:
    blocks, has_begun = AnswerBlocks(), False
    with run:
        async for parts in run:
            written = []
            for part in parts:
                if not has_begun:
                    has_begun = True
                    written.append(writer.begin(run))
                reason = part.finish_reason
                events = [*blocks.feed(part.events), *(blocks.end(reason) if reason is not None else ())]
                if events:
                    written.append(writer.events(events))
                if reason is not None:
                    written.append(await writer.end(Ended(run, blocks.all, reason, part.new.stop_reason)))
            if together := b"".join(written):
                yield together
