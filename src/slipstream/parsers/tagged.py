"""Tool calls in tags, one tag per parameter, with values as plain text; the schema of the tool gives their types."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass

from slipstream.params.values import is_deep_json
from slipstream.parsers.output_parser import Functions
from slipstream.parsers.reader import EventSink, Parse, Sink, TextReader, drop, without_surrogates

_NAME = re.compile(r"[^\s<>{}\"]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spelling


@dataclass(frozen=True)
class TaggedFormat:
    """begin, function[0] NAME function[1], parameters, function_end, end. Other text is content."""

    begin: str
    end: str
    function: tuple[str, str]  # around the name; the first may be empty
    function_end: str  # may be empty
    key: tuple[str, str]
    value: tuple[str, str]  # the first may be empty
    trims_lines: bool  # one line break after and before each value is part of the tags

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        opens = (self.begin, self.function[0]) if self.function[0] else (self.begin,)
        while (found := (yield from reader.until(opens, out.content))) is not None:
            raw = [found]
            if found == self.begin:
                yield from reader.space(raw.append)
                if self.function[0] and (yield from reader.starts((self.function[0],), raw.append)) is None:
                    out.content("".join(raw))
                    continue
            name: list[str] = []
            name_ends = () if self.function[0] else (self.end, self.key[0])
            closed = yield from reader.until((self.function[1],), name.append, keep=name_ends)
            given = "".join(name).strip()
            if closed is None or _NAME.fullmatch(given) is None:
                out.content("".join([*raw, *name, self.function[1] if closed == self.function[1] else ""]))
                continue
            out.call(given)
            yield from _Parameters(self, reader, out, functions, given).read()
            out.separate()
            if self.function_end:
                yield from reader.space(out.content)
                out.separate()
                yield from reader.starts((self.end,), drop_cut=True)


class _Parameters:
    def __init__(self, how: TaggedFormat, reader: TextReader, out: EventSink, functions: Functions, name: str) -> None:
        self.how, self.reader, self.out = how, reader, out
        self.functions, self.name = functions, name

    def read(self) -> Parse[None]:
        """Writes the parameters as one JSON object. Text between them is content, which follows the call."""
        how, reader, out = self.how, self.reader, self.out
        last = how.function_end or how.end
        count = 0
        between: list[str] = []
        while True:
            out.separate()
            found = yield from reader.until((how.key[0], last), between.append, drop_cut=True)
            if found != how.key[0]:
                if found == last:
                    out.arguments("}" if count else "{}")
                out.content("".join(between))
                return
            key: list[str] = []
            key_ends = () if how.key[1] in last else (last,)
            if (yield from reader.until((how.key[1],), key.append, keep=key_ends)) != how.key[1]:
                out.arguments("".join([how.key[0], *key]))  # not in this format: written as it is
                continue
            if how.value[0]:
                yield from reader.space(drop)
                yield from reader.starts((how.value[0],))
            given = "".join(key).strip()
            out.arguments(("{" if not count else ", ") + json.dumps(given, ensure_ascii=False) + ": ")
            count += 1
            yield from self._read_value(self.functions.types_of(self.name, given))

    def _read_value(self, types: frozenset[str]) -> Parse[None]:
        how, reader, out = self.how, self.reader, self.out
        if how.trims_lines:
            yield from reader.starts(("\n",))
        value: _TextValue | _AnyValue
        value = _TextValue(out, trims_line=how.trims_lines) if types == {"string"} else _AnyValue(out, types)
        # a model that omits the end of a value continues with the next key or the end of the call
        last = how.function_end or how.end
        found = yield from reader.until((how.value[1],), value.add, keep=(how.key[0], last))
        value.finish(is_cut=found is None)


class _TextValue:
    """A string, written as it arrives."""

    def __init__(self, out: EventSink, *, trims_line: bool) -> None:
        self._out = out
        self._trims_line = trims_line
        self._pending = ""
        out.arguments('"')

    def add(self, text: str) -> None:
        text, self._pending = self._pending + text, ""
        if self._trims_line and text.endswith("\n"):
            text, self._pending = text[:-1], "\n"
        self._out.arguments(_escaped(text))

    def finish(self, *, is_cut: bool) -> None:
        if not is_cut:
            self._out.arguments('"')


class _AnyValue:
    """A value of another type, or of an unknown one, written when it is complete."""

    def __init__(self, out: EventSink, types: frozenset[str]) -> None:
        self._out = out
        self._types = types
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text)

    def finish(self, *, is_cut: bool) -> None:
        text = "".join(self._parts).strip()
        if is_cut:
            self._out.arguments(text)
            return
        value = _as_json(text, self._types)
        self._out.arguments('"' + _escaped(text) + '"' if value is None else value)


def _as_json(text: str, types: frozenset[str]) -> str | None:
    """The JSON that the text is, or None if it is a string. `types`: those that the parameter can have, if known."""
    source = _WORDS.get(text, text)
    if is_deep_json(source):
        return None
    try:
        value = json.loads(source)
    except ValueError:
        return None
    if "string" not in types:
        return source
    return source if not isinstance(value, str) and _types_of(value) & types else None


def _types_of(value: object) -> set[str]:
    if isinstance(value, int | float):
        return {"boolean", "any"} if isinstance(value, bool) else {"integer", "number", "any"}
    return {"array" if isinstance(value, list) else "object" if isinstance(value, dict) else "null", "any"}


def _escaped(text: str) -> str:
    """The text inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# Tool calls as a Python list of function calls: [name(key=value, ...), ...], at the start of the output.

_PYTHONIC_NAME = re.compile(r"[\w.\-]*")
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
            yield from reader.run(_PYTHONIC_NAME, name.append)
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
        out.arguments(_pythonic_as_json(value.strip()))
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


def _pythonic_as_json(source: str) -> str:
    """A Python or JSON literal as JSON; any other text as a JSON string."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown escapes in strings
        for read in (ast.literal_eval, json.loads):
            try:
                return without_surrogates(json.dumps(read(source), ensure_ascii=False, allow_nan=False))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
    return json.dumps(source, ensure_ascii=False)


# Tool calls whose form a grammar fixes: the output is the arguments of one known function.


@dataclass(frozen=True)
class FixedCallFormat:
    name: str

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        yield from reader.space(drop)
        if (yield from reader.peek()):
            out.call(self.name)
            yield from reader.rest(out.arguments)
