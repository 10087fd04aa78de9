"""Thinking: where the reasoning of a request begins and ends, as token ids, for `thinking_token_budget`."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Made by the front end, which has the tokenizer. The markers of all requests of a model are the same."""

    start: tuple[tuple[int, ...], ...]  # markers that begin reasoning
    end: tuple[tuple[int, ...], ...]  # markers that end it
    forced: tuple[int, ...]  # what is written when the budget is used
    is_open: bool  # whether the prompt ends within reasoning

    @property
    def markers(self) -> tuple[object, ...]:
        return self.start, self.end, self.forced
