"""OutputParser: turns the text of one sample, as it arrives, into content, reasoning and tool calls."""

from __future__ import annotations

from typing import Protocol

from slipstream.parsers.events import EventSink, ParserEvent
from slipstream.parsers.functions import Functions
from slipstream.parsers.harmony import HarmonyFormat
from slipstream.parsers.reader import Parse, TextReader
from slipstream.parsers.reasoning import ReasoningFormat


class ToolCallFormat(Protocol):
    """The format of a model family's tool calls. `read` reads the output after the reasoning, to its end."""

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]: ...


class OutputParser:
    """Linear in the text, and the joined events do not depend on how the text is cut. Raises for no text."""

    def __init__(
        self,
        reasoning: ReasoningFormat | HarmonyFormat | None = None,
        tools: ToolCallFormat | None = None,
        *,
        functions: Functions | None = None,
        is_open: bool = False,
    ) -> None:
        """`functions`: the tools of the request. `is_open`: the prompt began the reasoning."""
        self._reader = TextReader()
        self._out = EventSink()
        self._parse = self._run(reasoning, tools, functions or Functions(), is_open)
        self._advance()

    def feed(self, text: str) -> list[ParserEvent]:
        """Returns the events that this text completes; some text waits for what follows it."""
        self._reader.feed(text)
        self._advance()
        return self._out.take()

    def finish(self) -> list[ParserEvent]:
        """Returns the events at the end of the text."""
        self._reader.ended = True
        self._advance()
        self._out.finish()
        return self._out.take()

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    def _advance(self) -> None:
        next(self._parse, None)

    def _run(
        self,
        reasoning: ReasoningFormat | HarmonyFormat | None,
        tools: ToolCallFormat | None,
        functions: Functions,
        is_open: bool,
    ) -> Parse[None]:
        reader, out = self._reader, self._out
        if isinstance(reasoning, HarmonyFormat):
            tools = reasoning
        elif reasoning is not None:
            yield from reasoning.read(reader, out, is_open=is_open)
        if tools is not None:
            yield from tools.read(reader, out, functions)
        yield from reader.rest(out.content)
