"""TextReader: text that arrives in pieces, read by generators that yield when they need more of it.

The pieces that a sink gets depend on how the text was cut; joined they do not, and no decision depends on it. A piece
is searched once: between two calls of `feed` only a possible beginning of a marker stays unread, so the cost is linear
in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

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
            held = next((start for start in range(first, len(self._text)) if self._text[start:] in prefixes), None)
            self._pass(len(self._text) if held is None else held, sink)
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
        """Consumes one of the markers if the text continues with it, passes it to the sink, and returns it.
        `drop_cut`: as in `until`."""
        while True:
            found = next((marker for marker in markers if self._text.startswith(marker, self._offset)), None)
            if found is not None:
                self._offset += len(found)
                if sink is not None:
                    sink(found)
                return found
            tail = self._text[self._offset : self._offset + max(map(len, markers))]
            could_be = any(marker.startswith(tail) for marker in markers)
            if self.ended and drop_cut and could_be:
                self._offset += len(tail)
            if self.ended or not could_be:
                return None
            yield

    def _pass(self, end: int, sink: Sink) -> None:
        if end > self._offset:
            sink(self._text[self._offset : end])
            self._offset = end


Search = Callable[[str, int], "re.Match[str] | None"]


@lru_cache(maxsize=256)
def _markers(markers: tuple[str, ...]) -> tuple[Search, frozenset[str], int]:
    """A search for the markers, their proper prefixes, and the length of the longest one."""
    assert not any(one in other for one in markers for other in markers if one != other), markers
    prefixes = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, markers))).search, prefixes, max(map(len, markers))
