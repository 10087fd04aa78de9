"""Tool calls whose form a grammar fixes: the output is the arguments of one known function."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.parsers.events import EventSink
from slipstream.parsers.functions import Functions
from slipstream.parsers.reader import Parse, TextReader, drop


@dataclass(frozen=True)
class FixedCallFormat:
    name: str

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        yield from reader.space(drop)
        if (yield from reader.peek()):
            out.call(self.name)
            yield from reader.rest(out.arguments)
