"""OutputParser: turns the text of one sample, as it arrives, into content, reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.parsers.reader import EventSink, Parse, ParserEvent, Sink, TextReader, drop


class ToolCallFormat(Protocol):
    """The format of a model family's tool calls. `read` reads the output after the reasoning, to its end."""

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]: ...
    def __hash__(self) -> int: ...


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
            yield from reasoning.read(reader, out, is_open=is_open, has_tools=tools is not None)
        if tools is not None:
            yield from tools.read(reader, out, functions)
        yield from reader.content((), out)


# Reasoning that a model writes before its answer, between two markers.


@dataclass(frozen=True)
class ReasoningFormat:
    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    implicit: bool = False  # the output begins with reasoning, also without the marker
    stops: tuple[str, ...] = ()  # begin a call, which ends the reasoning where the model omits the marker
    calls: tuple[str, ...] = ()  # as `stops`, but longer than a marker: a thinking budget does not know them
    repeats: bool = False  # the content may be followed by more of it
    answer_begin: tuple[str, ...] = ()  # markers around the content; none is part of it
    answer_end: tuple[str, ...] = ()
    header: tuple[str, ...] = ()  # before each part: what begins it (the prompt, for the first one), and what ends it
    in_content: bool = False  # for clients that look for the markers in the content

    def is_open(self, prompt: str, *, continues: bool = False) -> bool:
        """Whether the output continues reasoning: the end of the prompt begins it, as some templates do. `continues`:
        the prompt ends within a message of the model."""
        ending = prompt.rstrip()
        if ending.endswith(self.begin):
            return True
        if continues:
            opened = max(prompt.rfind(marker) for marker in self.begin)
            return opened > max(prompt.rfind(marker) for marker in self.end)
        return self.implicit and not ending.endswith(self.end)

    def read(self, reader: TextReader, out: EventSink, *, is_open: bool, has_tools: bool = True) -> Parse[None]:
        """Reads the reasoning; the content follows. `has_tools`: there can be calls."""
        if self.in_content:
            if is_open:
                out.content(self.begin[0])
            return

        def read_thought() -> Parse[None]:
            yield from reader.until(self.end, out.reasoning, keep=self.stops + self.calls if has_tools else ())
            out.separate()

        def read_header() -> Parse[None]:
            yield from reader.until((), drop, keep=self.header[1:])

        def read_nothing() -> Parse[None]:
            yield from ()

        space: list[str] = []
        yield from reader.space(space.append)
        # a structure that a grammar demands has no header
        has_header = bool(self.header) and (yield from reader.peek()) not in ("{", "[")
        if has_header and (yield from reader.until((), space.append, keep=self.header)) is not None:
            space.clear()
        if (yield from reader.starts(self.begin)) is not None or is_open:
            space.clear()
            yield from read_thought()
            yield from reader.space(drop)
        if (yield from reader.starts(self.answer_begin)) is not None:
            space.clear()
            out.separate()
        reader.asides.update(dict.fromkeys(self.answer_end, read_nothing))
        if self.repeats:
            reader.asides.update(dict.fromkeys(self.begin, read_thought))
        reader.asides.update(dict.fromkeys(self.header[:1], read_header))
        out.content("".join(space))


# Functions: the tools of one request, as parsers need them: their names, and the types of their parameters.

_MAX_PARTS = 1_000  # of a parameter's schema
_TYPES = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean"}


class Functions:
    """`schemas`: the parameters of each function, as a JSON schema."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.schemas = dict(schemas or {})

    @classmethod
    def of_tools(cls, tools: Sequence[Mapping[str, Any]]) -> Functions:
        """`tools`: in the format of OpenAI's chat API, checked."""
        return cls({tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools})

    def __contains__(self, name: str) -> bool:
        return name in self.schemas

    def known(self, name: str) -> str:
        """The name of a function that a model may have written as NAME.NAME."""
        first, _, second = name.partition(".")
        return first if first == second and first in self.schemas and name not in self.schemas else name

    def types_of(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter can have; empty if the schema does not say."""
        schema = self.schemas.get(name, {})
        properties = schema.get("properties")
        return _types([properties.get(parameter)], schema) if isinstance(properties, Mapping) else frozenset()


def _types(left: list[object], root: Mapping[str, Any]) -> frozenset[str]:
    """The types of these parts of a schema and of the alternatives and references in them; empty for too many."""
    found: set[str] = set()
    seen: set[int] = set()
    while left:
        part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > _MAX_PARTS:
            return frozenset()
        if isinstance(reference := part.get("$ref"), str):
            left.append(reference_target(reference, root))
        elif isinstance(given := part.get("type"), str | list):
            names = [given] if isinstance(given, str) else given
            found.update(_TYPES.get(name, name) for name in names if isinstance(name, str))
        elif isinstance(values := part.get("enum"), list):
            found.update("string" if isinstance(value, str) else "any" for value in values)
        else:
            alternatives = (part.get(key) for key in ("anyOf", "oneOf", "allOf"))
            left += [inner for each in alternatives if isinstance(each, list) for inner in each]
    return frozenset(found)


def reference_target(reference: str, root: Mapping[str, Any]) -> object:
    """The target of a reference within a schema; None for other references."""
    node: object = root
    for name in reference.removeprefix("#/").split("/") if reference.startswith("#/") else [reference]:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


# gpt-oss's format (harmony): messages with a header, which names a channel and the recipient, and a body.
#
# The output is the rest of a message of the assistant: HEADER <|message|> BODY <|end|>, and further messages that begin
# with <|start|>. Bodies of the channel analysis are reasoning, those for functions.NAME are arguments of a call, all
# others are content.

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_CUT_HEADER = re.compile(
    r"(<\|start\|>\w*)?\s*(to=[^\s<]*)?\s*(<\|channel\|>\w*\s*(to=[^\s<]*)?\s*(<\|constrain\|>)?\w*)?\s*"
)


@dataclass(frozen=True)
class HarmonyFormat:
    """Reads reasoning and tool calls together."""

    markers: tuple[str, ...] = (_START, _CHANNEL, _MESSAGE, *_ENDS)

    def read(self, reader: TextReader, out: EventSink, functions: Functions) -> Parse[None]:
        raw: list[str] = []
        yield from reader.space(raw.append)
        found = yield from reader.starts((_CHANNEL, _START, "to="), raw.append)
        if found is None:  # no header
            out.content("".join(raw))
            found = yield from reader.until((_START, _CHANNEL), out.content)
            raw = [found or ""]
        while found is not None:
            ended = yield from reader.until((_MESSAGE, *_ENDS), raw.append)
            header = "".join(raw)
            if ended == _MESSAGE:
                yield from reader.until(_ENDS, _message(header, out), keep=(_START, _CHANNEL))
                out.separate()
            elif not _CUT_HEADER.fullmatch(header):
                out.content(header)
            found = yield from reader.until((_START, _CHANNEL), out.content)
            raw = [found or ""]


def _message(header: str, out: EventSink) -> Sink:
    """The output that receives the body of a message."""
    recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
    if recipient is not None and "to=functions." in header:
        out.call(recipient[1])
        return out.arguments
    return out.reasoning if recipient is not None or (channel and channel[1] == "analysis") else out.content
