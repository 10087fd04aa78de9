"""A caller with more prompts, which a scheduler takes as it has room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from slipstream.scheduler.waiting import PromptSources


class ScriptedSource:
    """`waiting`: what makes the prompts that were not taken yet."""

    def __init__(self, sources: PromptSources[Any], waiting: Iterable[Any], make: Callable[[Any], Any]) -> None:
        self.waiting = list(waiting)
        self.num_asked = 0
        self._make = make
        sources.add(self, is_lazy=True)

    def is_ready(self) -> bool:
        return True

    def take(self, limit: int) -> list[Any]:
        self.num_asked += 1
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return [*map(self._make, taken)]

    def fail(self, error: BaseException) -> None:
        raise error
