"""gpt-oss's format (harmony): messages with a header, which names a channel and the recipient, and a body.

The output is the rest of a message of the assistant: HEADER <|message|> BODY <|end|>, and further messages that begin
with <|start|>. Bodies of the channel analysis are reasoning, those for functions.NAME are arguments of a call, all
others are content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.parsers.events import EventSink
from slipstream.parsers.functions import Functions
from slipstream.parsers.reader import Parse, Sink, TextReader

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
