"""Reads one JSON value from a TextReader: finds its end, and passes its text on as it arrives.

Only the structure is checked, brackets and strings: what a model writes as a number or a key is passed on as it is.
"""

from __future__ import annotations

import json
import re

from slipstream.parsers.reader import Parse, Sink, TextReader

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
    try:
        value = json.loads(source, strict=False)
    except (ValueError, RecursionError):
        return None
    return without_surrogates(value) if isinstance(value, str) else None


def without_surrogates(text: str) -> str:
    r"""The text with U+FFFD for half of a surrogate pair, which a model may write as \ud800 and UTF-8 cannot have."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
