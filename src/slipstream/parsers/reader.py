"""TextReader: text that arrives in pieces, read by generators that yield when they need more of it.

The pieces that a sink gets depend on how the text was cut; joined they do not, and no decision depends on it. A piece
is searched once: between two calls of `feed` only a possible beginning of a marker stays unread, so the cost is linear
in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

import msgspec

T = TypeVar("T")
Parse = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns T."""
Sink = Callable[[str], object]

_SPACE = re.compile(r"\s*")


def drop(text: str) -> None:
    """A sink for text that only separates."""


class TextReader:
    def __init__(self) -> None:
        self._text = ""
        self._offset = 0
        self.ended = False
        # markers within the content, each with what reads the text after it; it is no content
        self.asides: dict[str, Callable[[], Parse[object]]] = {}

    def feed(self, text: str) -> None:
        self._text = self._text[self._offset :] + text
        self._offset = 0

    def until(
        self, markers: tuple[str, ...], sink: Sink, *, keep: tuple[str, ...] = (), drop_cut: bool = False
    ) -> Parse[str | None]:
        """Passes the text before the first marker to the sink. Returns the marker, which is consumed unless it is one
        of `keep`, or None at the end of the text. No marker may be part of another one. `drop_cut`: the beginning of a
        marker at the end of the text is a marker that was cut, and is dropped."""
        search, prefixes, longest = _markers(markers + keep)
        while True:
            found = search(self._text, self._offset)
            if found is not None:
                self._pass(found.start(), sink)
                if found[0] not in keep:
                    self._offset = found.end()
                return found[0]
            if self.ended and not drop_cut:
                self._pass(len(self._text), sink)
                return None
            first = max(self._offset, len(self._text) - longest + 1)
            partial = next((start for start in range(first, len(self._text)) if self._text[start:] in prefixes), None)
            self._pass(len(self._text) if partial is None else partial, sink)
            if self.ended:
                self._offset = len(self._text)
                return None
            yield

    def rest(self, sink: Sink) -> Parse[None]:
        """Passes all text to the sink."""
        while True:
            self._pass(len(self._text), sink)
            if self.ended:
                return
            yield

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Parse[None]:
        """Passes the longest run of characters that match to the sink. `pattern`: a character class with *."""
        while True:
            found = pattern.match(self._text, self._offset)
            assert found is not None, "a pattern with * always matches"
            self._pass(found.end(), sink)
            if self._offset < len(self._text) or self.ended:
                return
            yield

    def space(self, sink: Sink) -> Parse[None]:
        yield from self.run(_SPACE, sink)

    def peek(self) -> Parse[str]:
        """Returns the next character without consuming it; the empty text at the end."""
        while self._offset == len(self._text) and not self.ended:
            yield
        return self._text[self._offset : self._offset + 1]

    def take(self, sink: Sink) -> Parse[str]:
        """Passes the next character to the sink and returns it; the empty text at the end."""
        character = yield from self.peek()
        self._pass(self._offset + len(character), sink)
        return character

    def starts(
        self, markers: tuple[str, ...], sink: Sink | None = None, *, drop_cut: bool = False
    ) -> Parse[str | None]:
        """Consumes the longest of the markers that the text continues with, passes it to the sink, and returns it.
        `drop_cut`: as in `until`."""
        while True:
            rest = self._text[self._offset : self._offset + max(map(len, markers), default=0)]
            found = max((marker for marker in markers if rest.startswith(marker)), key=len, default=None)
            could_be = any(len(marker) > len(rest) and marker.startswith(rest) for marker in markers)
            if self.ended or not could_be:
                if found is not None and sink is not None:
                    sink(found)
                self._offset += len(found or (rest if could_be and drop_cut else ""))
                return found
            yield

    def content(self, markers: tuple[str, ...], out: EventSink, *, drop_cut: bool = False) -> Parse[str | None]:
        """As `until`, with the text before the marker as content, and what `asides` read left out."""
        while True:
            if not markers and not self.asides:
                yield from self.rest(out.content)
                return None
            found = yield from self.until((*markers, *self.asides), out.content, drop_cut=drop_cut)
            if found is None or found in markers or found not in self.asides:
                return found
            out.separate()
            yield from self.asides[found]()
            out.separate()

    def _pass(self, end: int, sink: Sink) -> None:
        if end > self._offset:
            sink(self._text[self._offset : end])
            self._offset = end


Search = Callable[[str, int], "re.Match[str] | None"]


@lru_cache(maxsize=256)
def _markers(markers: tuple[str, ...]) -> tuple[Search, frozenset[str], int]:
    """A search for the markers, their proper prefixes, and the length of the longest one."""
    # one may end another: then both are complete at once, and the longer one is found, as it begins first
    assert not any(one in other and not other.endswith(one) for one in markers for other in markers), markers
    prefixes = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, markers))).search, prefixes, max(map(len, markers))


# Events of a parsed output: content, reasoning and tool calls, each in pieces that join to the whole.
#
# `EventSink` collects them. Whitespace that only separates parts of the output is dropped: around reasoning, before,
# between and after tool calls. All other text is kept.


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


# Reads one JSON value from a TextReader: finds its end, and passes its text on as it arrives.
#
# Only the structure is checked, brackets and strings: what a model writes as a number or a key is passed on as it is.

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^\s,:\"{}\[\];]*")
_CLOSERS = {"{": "}", "[": "]"}


def read_value(reader: TextReader, sink: Sink) -> Parse[bool]:
    """Passes one JSON value to the sink. False if the text is no value, or is cut, or closes the wrong bracket."""
    first = yield from reader.peek()
    if first == '"':
        return (yield from _read_string(reader, sink))
    if first not in _CLOSERS:
        size = [0]

        def count(text: str) -> None:
            size[0] += len(text)
            sink(text)

        yield from reader.run(_SCALAR, count)
        return size[0] > 0
    closers: list[str] = []
    while True:
        yield from reader.run(_BETWEEN, sink)
        character = yield from reader.peek()
        if character == '"':
            if not (yield from _read_string(reader, sink)):
                return False
            continue
        if not character or (character in "}]" and character != closers[-1]):
            return False
        yield from reader.take(sink)
        if character in _CLOSERS:
            closers.append(_CLOSERS[character])
        else:
            closers.pop()
            if not closers:
                return True


def _read_string(reader: TextReader, sink: Sink) -> Parse[bool]:
    yield from reader.take(sink)
    while True:
        yield from reader.run(_IN_STRING, sink)
        character = yield from reader.take(sink)
        if character == '"':
            return True
        if not character or not (yield from reader.take(sink)):  # the character after a backslash
            return False


def as_text(source: str) -> str | None:
    """The text of a JSON string; None for any other value."""
    if not source.lstrip().startswith('"'):
        return None
    try:
        return without_surrogates(json.loads(source, strict=False))
    except ValueError:
        return None


def without_surrogates(text: str) -> str:
    r"""The text with U+FFFD for half of a surrogate pair, which a model may write as \ud800 and UTF-8 cannot have."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
