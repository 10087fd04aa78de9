"""Events of a parsed output: content, reasoning and tool calls, each in pieces that join to the whole.

`EventSink` collects them. Whitespace that only separates parts of the output is dropped: around reasoning, before,
between and after tool calls. All other text is kept.
"""

from __future__ import annotations

import msgspec


class ContentDelta(msgspec.Struct, frozen=True):
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins. Its arguments follow, before the next call begins."""

    index: int
    name: str
    id: str | None = None  # where the model writes ids


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments. It is what the model wrote, so it may be invalid or cut."""

    index: int
    text: str


ParserEvent = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class EventSink:
    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[ParserEvent] = []
        self._kind: type[ParserEvent] = ContentDelta
        self._pieces: list[str] = []  # of the current event
        self._space: list[str] = []  # whitespace of content or reasoning that is kept only if more text follows
        self._skips_space = False  # at the start of a part

    def content(self, text: str) -> None:
        self._add_text(ContentDelta, text)

    def reasoning(self, text: str) -> None:
        self._add_text(ReasoningDelta, text)

    def call(self, name: str, id: str | None = None) -> None:
        """Begins a call. Later arguments are of this call."""
        self.separate()
        self._flush()
        self._events.append(ToolCallStart(self.num_calls, name, id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if self._kind is not ArgumentsDelta:
            self.separate()
            self._flush()
            self._kind = ArgumentsDelta
        self._pieces.append(text)

    def separate(self) -> None:
        """Drops the whitespace that follows."""
        self._space.clear()
        self._skips_space = True

    def take(self) -> list[ParserEvent]:
        """Returns the events since the last call. Adjacent pieces of one kind are one event."""
        self._flush()
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Keeps whitespace at the end of the output."""
        if self._space:
            self._pieces += self._space
            self._space.clear()

    def _add_text(self, kind: type[ParserEvent], text: str) -> None:
        if self._kind is not kind:
            self.separate()
            self._flush()
            self._kind = kind
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return
        self._skips_space = False
        kept = text.rstrip()
        if kept:
            self._pieces += self._space
            self._space.clear()
            self._pieces.append(kept)
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if not text:
            return
        if self._kind is ArgumentsDelta:
            self._events.append(ArgumentsDelta(self.num_calls - 1, text))
        elif self._kind is ReasoningDelta:
            self._events.append(ReasoningDelta(text))
        else:
            self._events.append(ContentDelta(text))
