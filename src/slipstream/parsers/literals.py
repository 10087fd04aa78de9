"""Tool calls in a notation of their own: Python calls, and Gemma's objects with keys without quotes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from slipstream.parsers.output_parser import Functions
from slipstream.parsers.reader import EventSink, Parse, Sink, TextReader, as_text, drop, read_value
from slipstream.parsers.tagged import AnyValue, TextValue, pythonic_as_json

_NAME = re.compile(r"[\w.\-]*")
_PLAIN = re.compile(r"[^\"'\\()\[\]{},]*")
_IN_QUOTES = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 32  # nested lists and dicts of one value, which a recursive function evaluates


@dataclass(frozen=True)
class PythonicFormat:
    """[name(key=value, ...), ...] between `begin` and `end`, or at the start of the output. Other text is content."""

    begin: str = ""
    end: str = ""
    bare: bool = True  # also without a marker, at the start of the output, if the name is a function of the request
    brackets: tuple[str, str] = ("[", "]")  # may be empty; then each call is on a line of its own

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        raw: list[str] = []
        yield from reader.space(raw.append)
        if self.bare and (yield from reader.starts(self.brackets[:1], raw.append)) is not None:
            yield from self._read_calls(reader, out, functions, raw)
        out.content("".join(raw))
        while self.begin and (yield from reader.content((self.begin,), out)) is not None:
            raw, num_before = [self.begin], out.num_calls
            yield from reader.space(raw.append)
            is_list = not self.brackets[0] or (yield from reader.starts(self.brackets[:1], raw.append)) is not None
            ended = is_list and (yield from self._read_calls(reader, out, None, raw))
            out.content("".join(raw))
            if out.num_calls > num_before and not ended:
                yield from reader.content((self.end,), out, drop_cut=True)
            out.separate()

    def _read_calls(self, reader: TextReader, out: EventSink, known: Functions | None, raw: list[str]) -> Parse[bool]:
        """Reads calls up to the end of the list, and the end marker. Leaves in `raw` what is no call. False if the
        marker is missing. `known`: the only names that count, if given."""
        has_calls = False
        while True:
            yield from reader.space(raw.append)
            if has_calls and self.end and (yield from reader.starts((self.end,), drop_cut=True)) is not None:
                raw.clear()
                return True
            name: list[str] = []
            yield from reader.run(_NAME, name.append)
            raw += name
            given = "".join(name)
            is_known = given in known if known is not None else given
            if not is_known or (yield from reader.starts(("(",), raw.append)) is None:
                return False
            raw.clear()
            has_calls = True
            out.call(given)
            if not (yield from _read_arguments(reader, out, self.end)):
                return False
            out.separate()
            yield from reader.space(raw.append)
            if (yield from reader.starts((",",), raw.append)) is None and self.brackets[0]:
                if (yield from reader.starts(self.brackets[1:])) is None:
                    return False
                yield from reader.space(drop)
                raw.clear()
                return not self.end or (yield from reader.starts((self.end,), drop_cut=True)) is not None


def _read_arguments(reader: TextReader, out: EventSink, end: str) -> Parse[bool]:
    """Reads `key=value, ...)` and writes it as a JSON object. False if the text is cut or no such list; then all text
    up to the end marker is part of the arguments."""
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
            yield from reader.until((), out.arguments, keep=(end,)) if end else reader.rest(out.arguments)
            return False
        out.arguments(("{" if not count else ", ") + json.dumps(key.strip(), ensure_ascii=False) + ": ")
        out.arguments(pythonic_as_json(value.strip()))
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


# Calls as begin call:NAME{key:value, ...} end: JSON whose keys have no quotes, and whose strings are between markers.

_KEY = re.compile(r"[^:{}\[\],<\s]*")
_SCALAR = re.compile(r"[^{}\[\],<]*")


@dataclass(frozen=True)
class BracedFormat:
    begin: str
    end: str
    quote: str  # before and after a string
    prefix: str = "call:"  # of a name

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        found: str | None = None
        while True:
            if not found or found != self.begin:
                found = yield from reader.content((self.begin,), out)
            if found is None:
                return
            raw = [found]
            name: list[str] = []
            yield from reader.space(raw.append)
            if (yield from reader.starts((self.prefix,), raw.append)) is not None:
                yield from reader.run(_NAME, name.append)
            found = None
            if not name or (yield from reader.starts(("{",))) is None:
                out.content("".join([*raw, *name]))
                continue
            out.call("".join(name))
            if not (yield from self._read_members(reader, out, functions, "".join(name))):
                out.separate()
                found = yield from reader.content((self.end, self.begin), out, drop_cut=True)
            out.separate()

    def _read_members(self, reader: TextReader, out: EventSink, functions: Functions, name: str) -> Parse[bool]:
        """Writes the arguments as JSON. True if the end marker was read, which closes all brackets. Arguments in
        another form are written as they are, up to this marker."""
        closers, has_items = ["}"], [False]
        out.arguments("{")
        while closers:
            yield from reader.space(drop)
            mark = yield from reader.starts((closers[-1], ",", self.end))
            if mark == self.end:
                out.arguments("".join(reversed(closers)))
                return True
            if mark == closers[-1]:
                out.arguments(closers.pop())
                has_items.pop()
            if mark is not None:
                continue
            types: frozenset[str] = frozenset()
            written = ", " if has_items[-1] else ""
            has_items[-1] = True
            if closers[-1] == "}":
                key = yield from self._read_key(reader)
                yield from reader.space(drop)
                if not key or (yield from reader.starts((":",))) is None:
                    out.arguments(written + key)
                    break
                written += json.dumps(key, ensure_ascii=False) + ": "
                types = functions.types_of(name, key) if len(closers) == 1 else types
                yield from reader.space(drop)
            out.arguments(written)
            if (bracket := (yield from reader.starts(("{", "[")))) is not None:
                out.arguments(bracket)
                closers.append(_CLOSERS[bracket])
                has_items.append(False)
            elif not (yield from self._read_value(reader, out, types, closers[-1])):
                break
        if closers:
            yield from reader.until((), out.arguments, keep=(self.end,))
        return False

    def _read_key(self, reader: TextReader) -> Parse[str]:
        key: list[str] = []
        if (yield from reader.peek()) == '"':
            yield from read_value(reader, key.append)
            return as_text("".join(key)) or ""
        if (yield from reader.starts((self.quote,))) is not None:
            yield from reader.until((self.quote,), key.append, keep=(self.end,))
        else:
            yield from reader.run(_KEY, key.append)
        return "".join(key)

    def _read_value(self, reader: TextReader, out: EventSink, types: frozenset[str], closer: str) -> Parse[bool]:
        """Writes a string, or a value without brackets. False if the text is none, or is cut."""
        if (yield from reader.peek()) == '"':
            return (yield from read_value(reader, out.arguments))
        value: TextValue | AnyValue
        if (yield from reader.starts((self.quote,))) is not None:
            value = TextValue(out) if not types or "string" in types else AnyValue(out, types)
            found = yield from reader.until((self.quote,), value.add, keep=(self.end,))
            value.finish(is_cut=found is None)
            return found is not None
        source: list[str] = []
        yield from reader.run(_SCALAR, source.append)
        following = yield from reader.peek()
        value = AnyValue(out, types)
        value.add("".join(source))
        value.finish(is_cut=not following)
        return following in (",", closer) or (following == "<" and bool(source))
