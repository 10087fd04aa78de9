"""ChatFormats: how a model writes reasoning and tool calls, by the server's options or the model's chat template."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import msgspec

from slipstream.front.served import ServedModel
from slipstream.parsers.families import NO_PARSER, detect_reasoning, detect_tools, reasoning_format, tool_call_format
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat, ToolCallFormat
from slipstream.serve.http.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer

GENERIC = "hermes"  # the format that a model without one is asked to use


class ChatFormats(msgspec.Struct, frozen=True):
    reasoning: ReasoningFormat | HarmonyFormat | None
    tools: ToolCallFormat | None
    has_short_ids: bool = False  # the template takes ids of calls with 9 characters only

    @classmethod
    def of(cls, served: ServedModel, settings: ServerSettings) -> ChatFormats:
        tokenizer = served.tokenizer
        if tokenizer is None:
            return cls(None, None)
        templates = tokenizer.chat_template(with_tools=True), tokenizer.chat_template()
        return _formats(templates, settings.tool_call_parser, settings.reasoning_parser)

    @property
    def is_harmony(self) -> bool:
        """Whether reasoning, content and calls are messages of gpt-oss's format."""
        return isinstance(self.reasoning, HarmonyFormat) or isinstance(self.tools, HarmonyFormat)

    def uses_special_tokens(self, tokenizer: Tokenizer, *, with_tools: bool) -> bool:
        """Whether a marker is a special token, which is not part of the text by default."""
        formats = (self.reasoning, self.tools if with_tools else None)
        markers = {marker for one in formats if one is not None for marker in _markers(one)}
        return not markers.isdisjoint(_special_texts(tokenizer))


@lru_cache(maxsize=64)
def _formats(templates: tuple[str | None, str | None], tools: str | None, reasoning: str | None) -> ChatFormats:
    tools = (detect_tools(templates[0]) or GENERIC) if tools is None else tools
    reasoning = detect_reasoning(templates[1]) if reasoning is None else reasoning
    return ChatFormats(
        None if reasoning in (None, NO_PARSER) else reasoning_format(reasoning),
        None if tools in (None, NO_PARSER) else tool_call_format(tools),
        has_short_ids=tools == "mistral",
    )


@lru_cache(maxsize=16)
def _special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    return frozenset(text for token in tokenizer.special_ids if (text := tokenizer.piece(token)) is not None)


def _markers(format: object) -> frozenset[str]:
    """The texts in the fields of a format."""
    assert dataclasses.is_dataclass(format)
    found: set[str] = set()
    for field in dataclasses.fields(format):
        value = getattr(format, field.name)
        found |= {value} if isinstance(value, str) else set(value) if isinstance(value, tuple) else set()
    return frozenset(found)
