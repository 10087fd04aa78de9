"""Tool calls as JSON objects with a name and arguments, after a marker or at the start of the output."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.parsers.output_parser import Functions
from slipstream.parsers.reader import EventSink, Parse, TextReader, as_text, drop, read_value


@dataclass(frozen=True)
class EnvelopeFormat:
    """An object, several of them, or a list of objects. Text that is none of this is content."""

    begin: tuple[str, ...] = ()
    end: str = ""
    name_key: str = "name"  # empty: the object has the name as its only key, and the arguments as its value
    arguments_key: str = "arguments"
    id_key: str = "id"
    bare: bool = False  # also without a marker, at the start of the output, if the name is a function of the request
    only_known: bool = False  # the name is a function of the request after a marker too
    drops_cut: bool = False  # the output may end with the beginning of a marker
    only_calls: bool = False  # a grammar demands calls, so text besides is a call that was cut off, and is dropped

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        known = functions if self.only_known else None
        if self.bare:
            reading = _Envelope(self, reader, out, [], functions)
            if not (yield from reading.read_all()):
                reading.content("".join(reading.raw))
        found: str | None = ""
        while self.begin:
            if not found:
                found = yield from reader.content(self.begin, out, drop_cut=self.drops_cut)
            if found is None:
                return
            found = yield from self.read_after(found, reader, out, known)
        if self.only_calls:
            yield from reader.rest(drop)

    def read_after(
        self, begin: str, reader: TextReader, out: EventSink, known: Functions | None = None
    ) -> Parse[str | None]:
        """Reads the calls after a marker. Returns the marker of the next ones where they follow at once, None at the
        end of the text, else the empty text."""
        reading = _Envelope(self, reader, out, [begin], known)
        if not (yield from reading.read_all()):
            out.content("".join(reading.raw))
            return ""
        if not self.end:
            return ""
        out.separate()
        others = tuple(marker for marker in self.begin if self.end not in marker)
        found = yield from reader.content((self.end, *others), out, drop_cut=True)
        if found == self.end:
            out.separate()
            return ""
        return found


class _Envelope:
    """`raw`: the text since the last call, which is content if no call follows. `known`: the only names that count, if
    given."""

    def __init__(
        self, how: EnvelopeFormat, reader: TextReader, out: EventSink, raw: list[str], known: Functions | None
    ) -> None:
        self.how = how
        self.reader = reader
        self.out = out
        self.content = drop if how.only_calls else out.content
        self.raw = raw
        self.known = known
        self.broken = False  # the arguments were no JSON, and all text up to the end is part of them

    def read_all(self) -> Parse[bool]:
        reader, raw = self.reader, self.raw
        yield from reader.space(raw.append)
        is_list = (yield from reader.peek()) == "["
        if is_list:
            yield from reader.take(raw.append)
            yield from reader.space(raw.append)
        num_before = self.out.num_calls
        while True:
            following = yield from reader.peek()
            if following != "{" or not (yield from self.read_object()):
                return not following and self.out.num_calls > num_before  # a list that is cut after a comma
            raw.clear()
            if self.broken:
                return True
            yield from reader.space(raw.append)
            following = yield from reader.peek()
            if following in (",", ";"):
                yield from reader.take(raw.append)
                yield from reader.space(raw.append)
            elif is_list or following != "{":
                if is_list and following == "]":
                    yield from reader.take(raw.append)
                raw.clear()
                return True

    def read_object(self) -> Parse[bool]:
        """Reads one call. False if it is none; then its text is in `raw`."""
        how, reader, raw, out = self.how, self.reader, self.raw, self.out
        keys = {how.arguments_key, "arguments", "parameters"}  # a model may confuse the last two
        name = id = arguments = None
        begun = False
        yield from reader.take(raw.append)
        while True:
            yield from reader.space(raw.append)
            character = yield from reader.peek()
            if character == "}":
                yield from reader.take(raw.append)
                break
            if (key := (yield from self._text_value())) is None:
                break
            yield from reader.space(raw.append)
            if (yield from reader.starts((":",), raw.append)) is None:
                break
            yield from reader.space(raw.append)
            first = yield from reader.peek()
            if not how.name_key and name is None:
                name, key = self._known(key), how.arguments_key
            if key in keys and name is not None and first == "{" and not begun:
                out.call(name, id)
                raw.clear()
                begun = True
                if not (yield from read_value(reader, out.arguments)):
                    yield from self._broken()
                    return True
            else:
                value: list[str] = []
                complete = yield from read_value(reader, value.append)
                source = "".join(value)
                raw.append(source)
                if not complete:
                    break
                if key == how.name_key:
                    name = self._known(as_text(source))
                elif key == how.id_key:
                    id = as_text(source)
                elif key in keys:
                    arguments = source
            yield from reader.space(raw.append)
            yield from reader.starts((",",), raw.append)
        ended = character == "}"
        if begun:
            if not ended:
                self.content("".join(raw))
            return True
        if name is None or not ended or (self.known is not None and arguments is None):
            return False
        out.call(name, id)
        out.arguments(_as_object(arguments))
        return True

    def _text_value(self) -> Parse[str | None]:
        if (yield from self.reader.peek()) != '"':
            return None
        value: list[str] = []
        complete = yield from read_value(self.reader, value.append)
        self.raw += value
        return as_text("".join(value)) if complete else None

    def _known(self, name: str | None) -> str | None:
        return name if name and (self.known is None or name in self.known) else None

    def _broken(self) -> Parse[None]:
        """Arguments that are no JSON: all text up to the end marker is part of them."""
        self.broken = True
        if self.how.end:
            yield from self.reader.until((), self.out.arguments, keep=(self.how.end,))
        else:
            yield from self.reader.rest(self.out.arguments)


def _as_object(arguments: str | None) -> str:
    """Arguments that are null or missing as an empty object, and those that are JSON in a string as this JSON."""
    if arguments is None or arguments == "null":
        return "{}"
    return as_text(arguments) or arguments


# Tool calls as a name, a separator and a JSON object, each call between two markers.


@dataclass(frozen=True)
class NamedFormat:
    """A section of calls: section[0] (begin NAME separator ARGUMENTS end)* section[1]. Other text is content."""

    section: tuple[str, str]
    begin: str
    separator: str
    end: str
    before_name: str = ""  # ends what comes before the name, such as a type
    after_arguments: str = ""  # may be between arguments and end
    name_is_id: bool = False  # the name has the form functions.NAME:INDEX, which is also the id of the call

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        while (yield from reader.content((self.section[0],), out)) is not None:
            raw = [self.section[0]]
            num_before = out.num_calls
            while True:
                yield from reader.space(raw.append)
                has_calls = out.num_calls > num_before
                found = yield from reader.starts((self.section[1], self.begin), raw.append, drop_cut=has_calls)
                if found == self.begin and (yield from self._read_call(reader, out, raw)):
                    raw.clear()
                    continue
                if out.num_calls == num_before or found == self.begin:
                    out.content("".join(raw))
                break
            out.separate()

    def _read_call(self, reader: TextReader, out: EventSink, raw: list[str]) -> Parse[bool]:
        """Reads one call. False if it is none; then its text is in `raw`."""
        name: list[str] = []

        def add(text: str) -> None:
            name.append(text)
            raw.append(text)

        if self.before_name:
            found = yield from reader.until((self.before_name,), raw.append, keep=(self.end, self.section[1]))
            if found != self.before_name:
                return False
            raw.append(found)
        found = yield from reader.until((self.separator,), add, keep=(self.end, self.section[1]))
        given = "".join(name).strip()
        if found != self.separator or not given:
            raw += [found] if found == self.separator else []
            return False
        if self.name_is_id:
            out.call(given.removeprefix("functions.").rpartition(":")[0] or given, given)
        else:
            out.call(given)
        yield from reader.space(drop)
        is_whole = (yield from reader.peek()) == "{" and (yield from read_value(reader, out.arguments))
        if is_whole:
            yield from reader.space(drop)
            if self.after_arguments:
                yield from reader.starts((self.after_arguments,), drop_cut=True)
        yield from reader.until((self.end,), out.arguments, keep=(self.section[1],), drop_cut=is_whole)
        return True


@dataclass(frozen=True)
class MistralFormat:
    """After the marker either a list of JSON objects, or a name and its arguments: NAME{...}, NAME[ARGS]{...} or
    NAME[CALL_ID]ID[ARGS]{...}. Each further call in the second form has a marker of its own."""

    begin: str = "[TOOL_CALLS]"

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        envelope = EnvelopeFormat((self.begin,))
        while (yield from reader.content((self.begin,), out)) is not None:
            space: list[str] = []
            yield from reader.space(space.append)
            if (yield from reader.peek()) in ("[", "{"):
                yield from envelope.read_after(self.begin + "".join(space), reader, out)
            else:
                yield from self._read_named(self.begin + "".join(space), reader, out)

    def _read_named(self, raw: str, reader: TextReader, out: EventSink) -> Parse[None]:
        name: list[str] = []
        id: list[str] = []
        ends = ("[ARGS]", "[CALL_ID]")
        found = yield from reader.until(ends, name.append, keep=("{", self.begin))
        if found == "[CALL_ID]":
            found = yield from reader.until(("[ARGS]",), id.append, keep=("{", self.begin))
        given = "".join(name).strip()
        if found in (None, self.begin) or not given:
            between = "" if found is None or found in ("{", self.begin) else found
            out.content("".join([raw, *name, *(["[CALL_ID]", *id] if id else []), between]))
            return
        out.call(given, "".join(id).strip() or None)
        yield from reader.space(drop)
        if not (yield from read_value(reader, out.arguments)):
            yield from reader.until((), out.arguments, keep=(self.begin,))
