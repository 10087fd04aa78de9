"""Tool calls as JSON objects with a name and arguments, after a marker or at the start of the output."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.parsers.events import EventSink
from slipstream.parsers.functions import Functions
from slipstream.parsers.json_text import as_text, read_value
from slipstream.parsers.reader import Parse, TextReader, drop

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class EnvelopeFormat:
    """An object, several of them, or a list of objects. Text that is none of this is content."""

    begin: tuple[str, ...] = ()
    end: str = ""
    bare: bool = False  # also without a marker, at the start of the output, if the name is a function of the request
    only_calls: bool = False  # a grammar demands calls, so text besides is a call that was cut off, and is dropped

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        if self.bare:
            yield from _read_bare(reader, out, functions, self)
        found: str | None = ""
        while self.begin:
            if not found:
                found = yield from reader.until(self.begin, out.content)
            if found is None:
                return
            found = yield from self.read_after(found, reader, out)
        yield from reader.rest(drop if self.only_calls else out.content)

    def read_after(self, begin: str, reader: TextReader, out: EventSink) -> Parse[str | None]:
        """Reads the calls after a marker. Returns the marker of the next ones where they follow at once, None at the
        end of the text, else the empty text."""
        reading = _Envelope(reader, out, self.end, [begin])
        if not (yield from reading.read_all()):
            out.content("".join(reading.raw))
            return ""
        if not self.end:
            return ""
        out.separate()
        found = yield from reader.until((self.end, *self.begin), out.content, drop_cut=True)
        if found == self.end:
            out.separate()
            return ""
        return found


def _read_bare(reader: TextReader, out: EventSink, functions: Functions, how: EnvelopeFormat) -> Parse[None]:
    reading = _Envelope(reader, out, how.end, [], functions, only_calls=how.only_calls)
    if not (yield from reading.read_all()):
        reading.content("".join(reading.raw))


class _Envelope:
    """`raw`: the text since the last call, which is content if no call follows."""

    def __init__(
        self,
        reader: TextReader,
        out: EventSink,
        end: str,
        raw: list[str],
        functions: Functions | None = None,
        *,
        only_calls: bool = False,
    ) -> None:
        self.reader = reader
        self.out = out
        self.content = drop if only_calls else out.content
        self.end = end
        self.raw = raw
        self.functions = functions  # the only names that count, if given
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
        reader, raw, out = self.reader, self.raw, self.out
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
            if key in _ARGUMENTS and name is not None and first == "{" and not begun:
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
                if key == "name":
                    name = self._known(as_text(source))
                elif key == "id":
                    id = as_text(source)
                elif key in _ARGUMENTS:
                    arguments = source
            yield from reader.space(raw.append)
            yield from reader.starts((",",), raw.append)
        ended = character == "}"
        if begun:
            if not ended:
                self.content("".join(raw))
            return True
        if name is None or not ended or (self.functions is not None and arguments is None):
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
        return name if name and (self.functions is None or name in self.functions) else None

    def _broken(self) -> Parse[None]:
        """Arguments that are no JSON: all text up to the end marker is part of them."""
        self.broken = True
        if self.end:
            yield from self.reader.until((), self.out.arguments, keep=(self.end,))
        else:
            yield from self.reader.rest(self.out.arguments)


def _as_object(arguments: str | None) -> str:
    """Arguments that are null or missing as an empty object, and those that are JSON in a string as this JSON."""
    if arguments is None or arguments == "null":
        return "{}"
    return as_text(arguments) or arguments
