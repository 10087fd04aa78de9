"""StopMatcher: finds stop strings in a text that arrives in increments.

The stop string that is complete first ends the text, and of two that end at the same offset the longer. So the result
does not depend on the increments.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may be the beginning of a stop string."""

    __slots__ = ("matched", "_stops", "_include", "_held")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops), f"an empty stop string would match everywhere: {stops}"
        self.matched: str | None = None  # the stop string that was found
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """Adds text and returns what cannot be part of a stop string. Returns nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end, stop = self._first_complete(text)
        if stop is not None:
            self.matched, self._held = stop, ""
            return text[: end if self._include else end - len(stop)]
        certain = len(text) - self._num_open(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str | None]:
        """Returns the end of the first complete stop string, and the string. It begins in `text`, which includes the
        text held back."""
        first, found = len(text) + 1, ""
        for stop in self._stops:
            offset = text.find(stop)
            if offset >= 0 and (offset + len(stop), -len(stop)) < (first, -len(found)):
                first, found = offset + len(stop), stop
        return first, found or None

    def _num_open(self, text: str) -> int:
        """The length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            offset = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= offset < len(text) - longest:
                if stop.startswith(text[offset:]):
                    longest = len(text) - offset
                    break
                offset = text.find(stop[0], offset + 1)
        return longest
