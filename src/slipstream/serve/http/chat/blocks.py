"""AnswerBlocks: the output of a sample as text, reasoning and tool calls in the order in which the model writes them.

APIs other than OpenAI's chat send an answer as such blocks, and a stream as their starts, pieces and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from slipstream.parsers.reader import ArgumentsDelta, ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart
from slipstream.serve.http.chat.chat_run import ChatAnswer

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

    def end(self) -> list[BlockEvent]:
        """Ends the block that is open, if there is one."""
        if self._open is None:
            return []
        block, self._open = self._open, None
        return [BlockEnd(block)]

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


def blocks_of(answer: ChatAnswer) -> list[Block]:
    """The blocks of a whole answer."""
    blocks = AnswerBlocks()
    blocks.feed(answer.events)
    return blocks.all
