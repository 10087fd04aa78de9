"""Tool calls as a Python list of function calls: [name(key=value, ...), ...], at the start of the output."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass

from slipstream.parsers.events import EventSink
from slipstream.parsers.functions import Functions
from slipstream.parsers.json_text import without_surrogates
from slipstream.parsers.reader import Parse, Sink, TextReader, drop

_NAME = re.compile(r"[\w.\-]*")
_PLAIN = re.compile(r"[^\"'\\()\[\]{},]*")
_IN_QUOTES = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 32  # nested lists and dicts of one value, which a recursive function evaluates


@dataclass(frozen=True)
class PythonicFormat:
    """The list may be between `begin` and `end`. Only functions of the request are calls; other text is content."""

    begin: str = ""
    end: str = ""

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        raw: list[str] = []
        yield from reader.space(raw.append)
        if self.begin:
            yield from reader.starts((self.begin,), raw.append)
            yield from reader.space(raw.append)
        if (yield from reader.starts(("[",), raw.append)) is not None:
            yield from self._read_calls(reader, out, functions, raw)
        out.content("".join(raw))
        yield from reader.rest(out.content)

    def _read_calls(self, reader: TextReader, out: EventSink, functions: Functions, raw: list[str]) -> Parse[None]:
        """Reads calls up to the end of the list. Leaves in `raw` what is no call."""
        while True:
            yield from reader.space(raw.append)
            name: list[str] = []
            yield from reader.run(_NAME, name.append)
            raw += name
            given = "".join(name)
            if given not in functions or (yield from reader.starts(("(",), raw.append)) is None:
                return
            raw.clear()
            out.call(given)
            if not (yield from _read_arguments(reader, out)):
                return
            out.separate()
            yield from reader.space(raw.append)
            if (yield from reader.starts((",",), raw.append)) is None:
                if (yield from reader.starts(("]",))) is not None:
                    yield from reader.space(raw.append)
                    if self.end:
                        yield from reader.starts((self.end,), drop_cut=True)
                    raw.clear()
                return


def _read_arguments(reader: TextReader, out: EventSink) -> Parse[bool]:
    """Reads `key=value, ...)` and writes it as a JSON object. False if the text is cut or no such list."""
    count = 0
    while True:
        yield from reader.space(drop)
        if (yield from reader.starts((")",))) is not None:
            out.arguments("}" if count else "{}")
            return True
        source: list[str] = []
        complete = yield from _read_item(reader, source.append)
        key, equals, value = "".join(source).partition("=")
        if not (complete and equals and key.strip().isidentifier()):
            out.arguments("".join(source))  # not in this format: written as it is
            yield from reader.rest(out.arguments)
            return False
        out.arguments(("{" if not count else ", ") + json.dumps(key.strip(), ensure_ascii=False) + ": ")
        out.arguments(_as_json(value.strip()))
        count += 1
        yield from reader.starts((",",))


def _read_item(reader: TextReader, sink: Sink) -> Parse[bool]:
    """Passes the text up to a comma or a closing bracket on this level to the sink."""
    closers: list[str] = []
    while True:
        yield from reader.run(_PLAIN, sink)
        character = yield from reader.peek()
        if not character or len(closers) > _MAX_DEPTH:
            return False
        if not closers and character in ",)]}":
            return character in ",)"
        if character in ")]}" and character != closers.pop():
            return False
        yield from reader.take(sink)
        if character in _CLOSERS:
            closers.append(_CLOSERS[character])
        elif character in _IN_QUOTES:
            while (yield from reader.peek()) not in (character, ""):
                yield from reader.run(_IN_QUOTES[character], sink)
                if (yield from reader.starts(("\\",), sink)) is not None:
                    yield from reader.take(sink)
            yield from reader.take(sink)


def _as_json(source: str) -> str:
    """A Python or JSON literal as JSON; any other text as a JSON string."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown escapes in strings
        for read in (ast.literal_eval, json.loads):
            try:
                return without_surrogates(json.dumps(read(source), ensure_ascii=False, allow_nan=False))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
    return json.dumps(source, ensure_ascii=False)
