"""Reasoning that a model writes before its answer, between two markers."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.parsers.events import EventSink
from slipstream.parsers.reader import Parse, TextReader


@dataclass(frozen=True)
class ReasoningFormat:
    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    implicit: bool = False  # the output begins with reasoning, also without the marker
    stops: tuple[str, ...] = ()  # end the reasoning where the model omits the marker; not part of the reasoning

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

    def read(self, reader: TextReader, out: EventSink, *, is_open: bool) -> Parse[None]:
        """Reads the reasoning; the content follows."""
        space: list[str] = []
        yield from reader.space(space.append)
        begun = yield from reader.starts(self.begin)
        if begun is None and not is_open:
            out.content("".join(space))
            return
        yield from reader.until(self.end, out.reasoning, keep=self.stops)
        out.separate()
