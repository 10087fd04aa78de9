"""Tool calls as a name, a separator and a JSON object, each call between two markers."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.parsers.envelope import EnvelopeFormat
from slipstream.parsers.events import EventSink
from slipstream.parsers.functions import Functions
from slipstream.parsers.json_text import read_value
from slipstream.parsers.reader import Parse, TextReader, drop


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
        while (yield from reader.until((self.section[0],), out.content)) is not None:
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
            out.call(given.partition(":")[0].rpartition(".")[2], given)
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
        while (yield from reader.until((self.begin,), out.content)) is not None:
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
