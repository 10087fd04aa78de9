"""Tool calls in tags, one tag per parameter, with values as plain text; the schema of the tool gives their types."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass

from slipstream.params.values import is_deep_json
from slipstream.parsers.output_parser import Functions
from slipstream.parsers.reader import EventSink, Parse, TextReader, drop, without_surrogates

_NAME = re.compile(r"[^\s<>{}\"]+")
_ATTRIBUTE = re.compile(r'(\w+)="(\w+)"')
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spelling


@dataclass(frozen=True)
class TaggedFormat:
    """A section of calls from begin to end, each as function[0] NAME function[1], parameters, function_end. Other text
    is content."""

    begin: str  # may be empty: no section
    end: str
    function: tuple[str, str]  # around the name; the first may be empty: one call in each section
    function_end: str  # may be empty
    key: tuple[str, str]
    value: tuple[str, str]  # the first may be empty
    trims_lines: bool = False  # one line break after and before each value is part of the tags
    bare: bool = False  # a call may be outside of a section
    between: tuple[str, ...] = ()  # further markers before and after a call
    type_key: str = ""  # the attribute behind a key that says whether the value is a string
    cdata: tuple[str, str] = ("", "")  # may be around a value

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        opens = tuple(filter(None, (self.begin, self.function[0] if self.bare or not self.begin else "")))
        found: str | None = None
        while True:
            if not found or found != self.begin:
                found = yield from reader.content(opens, out)
            if found is None:
                return
            raw = [found]
            if not (self.begin and self.function[0]):
                yield from self._read_call(reader, out, functions, raw)
                found = None
                continue
            num_before = out.num_calls
            if found == self.begin:
                found = yield from self._next(reader, out, raw)
            while found == self.function[0]:
                yield from self._read_call(reader, out, functions, raw)
                raw.clear()
                found = yield from self._next(reader, out, None if out.num_calls > num_before else raw)
            if found == self.begin and raw:  # a marker after a section without calls
                raw.pop()
            out.content("".join(raw))
            out.separate()

    def _next(self, reader: TextReader, out: EventSink, raw: list[str] | None) -> Parse[str | None]:
        """Consumes the next marker in a section and what is between calls. None: something else follows. `raw`: gets
        the text where no call was before it."""
        marks = (self.begin, self.end, self.function[0], *self.between)
        sink = drop if raw is None else raw.append
        while True:
            yield from reader.space(sink)
            found = yield from reader.starts(marks, sink, drop_cut=raw is None)
            if found is None and raw is None:
                found = yield from reader.content(marks, out, drop_cut=True)
            if found not in self.between:
                return found

    def _read_call(self, reader: TextReader, out: EventSink, functions: Functions, raw: list[str]) -> Parse[None]:
        """Reads one call after the marker that begins it. If it is none, its text is content."""
        name: list[str] = []
        name_ends = () if self.function[0] else (self.end, self.key[0])
        closed = yield from reader.until((self.function[1],), name.append, keep=name_ends)
        given = functions.known("".join(name).partition('"' if self.type_key else self.function[1])[0].strip())
        if closed is None or _NAME.fullmatch(given) is None:
            out.content("".join([*raw, *name, self.function[1] if closed == self.function[1] else ""]))
            return
        out.call(given)
        yield from _Parameters(self, reader, out, functions, given).read()
        out.separate()


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
            types = self.functions.types_of(self.name, given := "".join(key).strip())
            if how.type_key:
                attributes: list[str] = []
                yield from reader.until((how.value[0],), attributes.append, keep=(last,))
                if (named := dict(_ATTRIBUTE.findall("".join(attributes))).get(how.type_key)) is not None:
                    types = frozenset({"string"} if named in ("true", "string") else ())
            elif how.value[0]:
                yield from reader.space(drop)
                yield from reader.starts((how.value[0],))
            out.arguments(("{" if not count else ", ") + json.dumps(given, ensure_ascii=False) + ": ")
            count += 1
            yield from self._read_value(types)

    def _read_value(self, types: frozenset[str]) -> Parse[None]:
        how, reader, out = self.how, self.reader, self.out
        if how.trims_lines:
            yield from reader.starts(("\n",))
        value: TextValue | AnyValue
        value = TextValue(out, trims_line=how.trims_lines) if types == {"string"} else AnyValue(out, types)
        if how.cdata[0] and (yield from reader.starts((how.cdata[0],))) is not None:
            yield from reader.until((how.cdata[1],), value.add)
        # a model that omits the end of a value continues with the next key or the end of the call
        last = how.function_end or how.end
        found = yield from reader.until((how.value[1],), value.add, keep=(how.key[0], last))
        value.finish(is_cut=found is None)


class TextValue:
    """A string, written as it arrives."""

    def __init__(self, out: EventSink, *, trims_line: bool = False) -> None:
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


class AnyValue:
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
        value = as_json(text, self._types)
        self._out.arguments('"' + _escaped(text) + '"' if value is None else value)


def as_json(text: str, types: frozenset[str]) -> str | None:
    """The JSON that the text is, or None if it is a string. `types`: those that the parameter can have, if known."""
    source = _WORDS.get(text, text)
    if is_deep_json(source):
        return None
    try:
        value = json.loads(source)
    except ValueError:
        # some templates print lists and objects as Python does
        is_literal = "string" not in types and types & {"array", "object"} and source[:1] in ("[", "{")
        return pythonic_as_json(source) if is_literal and "(" not in source else None
    if "string" not in types:
        return source
    return source if not isinstance(value, str) and _types_of(value) & types else None


def pythonic_as_json(source: str) -> str:
    """A Python or JSON literal as JSON; any other text as a JSON string."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown escapes in strings
        for read in (ast.literal_eval, json.loads):
            try:
                return without_surrogates(json.dumps(read(source), ensure_ascii=False, allow_nan=False))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
    return json.dumps(source, ensure_ascii=False)


def _types_of(value: object) -> set[str]:
    if isinstance(value, int | float):
        return {"boolean", "any"} if isinstance(value, bool) else {"integer", "number", "any"}
    return {"array" if isinstance(value, list) else "object" if isinstance(value, dict) else "null", "any"}


def _escaped(text: str) -> str:
    """The text inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# Tool calls whose form a grammar fixes: the output is the arguments of one known function.


@dataclass(frozen=True)
class FixedCallFormat:
    name: str

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        yield from reader.space(drop)
        if (yield from reader.peek()):
            out.call(self.name)
            yield from reader.rest(out.arguments)
