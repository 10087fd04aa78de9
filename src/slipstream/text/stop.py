"""StopMatcher: stop strings in a text that arrives in increments.

The stop that is complete first ends the text, and of two that end together the longer. So the result does not depend on
how the text was cut into increments.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text that may be the beginning of a stop string is held back until it is known not to be."""

    __slots__ = ("matched", "_stops", "_include", "_held")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops), f"an empty stop string would match everywhere: {stops}"
        self.matched: str | None = None  # the stop string that was met
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now certain. After a match: nothing, whatever comes."""
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
        """No more text will come: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str | None]:
        """Where the first complete stop ends. It begins within `text`: all that could begin one was held."""
        first, found = len(text) + 1, ""
        for stop in self._stops:
            place = text.find(stop)
            if place >= 0 and (place + len(stop), -len(stop)) < (first, -len(found)):
                first, found = place + len(stop), stop
        return first, found or None

    def _num_open(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop."""
        longest = 0
        for stop in self._stops:
            place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= place < len(text) - longest:
                if stop.startswith(text[place:]):
                    longest = len(text) - place
                    break
                place = text.find(stop[0], place + 1)
        return longest
