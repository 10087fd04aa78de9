"""ThinkingAutomaton: finds the markers of reasoning in a row's tokens, and what to write when the budget is used.

States: outside of reasoning, with the matched part of a start marker; inside, with the matched part of an end marker;
or within the forced text. Host only (numpy); the device has copies of the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Tokens = tuple[int, ...]
Table = NDArray[np.int64]


class ThinkingAutomaton:
    def __init__(self, thinking: Thinking) -> None:
        """Follows the markers of `thinking`; its `is_open` has no effect."""
        ends = thinking.end
        outside, inside = _prefixes(thinking.start), _prefixes(ends)
        forced = thinking.forced
        self.tokens: Table = np.array(sorted({token for each in (*thinking.start, *ends) for token in each}), np.int64)
        self._columns = {token: column for column, token in enumerate(self.tokens.tolist())}
        self.first_inside = len(outside)
        chain = len(outside) + len(inside) - 1  # plus i: i tokens of the forced text are written, at least 1
        count, width = len(outside) + len(inside) + len(forced) - 1, len(self.tokens) + 1
        # [states, tokens + 1] by the column of a token, the last one for all other tokens
        self.next: Table = np.zeros((count, width), np.int64)
        self.delta: Table = np.zeros((count, width), np.int64)  # added to the number of reasoning tokens
        self.is_inside: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.is_forcing: NDArray[np.bool_] = np.zeros(count, np.bool_)  # within the forced text
        # Token to write when the budget is used; -1: none. If another one is drawn, because a grammar does not allow it
        # yet, it is written later.
        self.forced: Table = np.full(count, -1, np.int64)
        self.next_forced: Table = np.zeros(count, np.int64)  # state after it

        def after(num: int) -> int:
            return chain + num if num < len(forced) else 0

        for state, prefix in enumerate(outside):
            for token, column in self._columns.items():
                found, _ = _advance((*prefix, token), outside, thinking.start)
                self.next[state, column] = self.first_inside if found is None else outside.index(found)
        for index, prefix in enumerate(inside):
            state = self.first_inside + index
            self.is_inside[state] = True
            self.next[state, -1], self.delta[state] = self.first_inside, 1
            for token, column in self._columns.items():
                found, length = _advance((*prefix, token), inside, ends)
                self.next[state, column] = 0 if found is None else self.first_inside + inside.index(found)
                if found is None:
                    self.delta[state, column] = 1 - length  # the marker is no reasoning
            num = max(num for num in range(len(forced)) if num == 0 or prefix[-num:] == forced[:num])
            self.forced[state], self.next_forced[state] = forced[num], after(num + 1)
        for num in range(1, len(forced)):
            state = chain + num
            self.is_forcing[state] = True
            self.next[state], self.forced[state], self.next_forced[state] = state, forced[num], after(num + 1)

    def follow(self, state: int, count: int, budget: int, tokens: Iterable[int]) -> tuple[int, int]:
        """State and number of reasoning tokens after these tokens, as the device computes them."""
        own: NDArray[Any] = np.fromiter(tokens, np.int64)
        stops = np.flatnonzero(np.isin(own, self.tokens)).tolist()
        index = 0
        for stop in (*stops, len(own)):
            while index <= stop and index < len(own):
                token, is_inside = int(own[index]), bool(self.is_inside[state])
                is_forced = self.is_forcing[state] or (is_inside and count >= budget)
                if is_forced and token == self.forced[state]:
                    state, index = int(self.next_forced[state]), index + 1
                elif is_forced or index == stop:
                    column = self._columns.get(token, -1)
                    state, count = int(self.next[state, column]), count + int(self.delta[state, column])
                    index += 1
                else:  # tokens of no marker, up to the next marker token or the end of the budget
                    num = min(stop - index, budget - count) if is_inside else stop - index
                    state, count, index = int(self.next[state, -1]), count + num * is_inside, index + num
        return state, count


def _prefixes(markers: Iterable[Tokens]) -> list[Tokens]:
    """All proper prefixes, the empty one first."""
    return sorted({each[:num] for each in markers for num in range(len(each))}, key=lambda each: (len(each), each))


def _advance(read: Tokens, prefixes: list[Tokens], markers: Iterable[Tokens]) -> tuple[Tokens | None, int]:
    """The longest prefix of a marker at the end of the tokens read; or None and the length of a marker that ends
    there."""
    for start in range(len(read)):
        if read[start:] in markers:
            return None, len(read) - start
    return next(read[start:] for start in range(len(read) + 1) if read[start:] in prefixes), 0


# Thinking: where the reasoning of a request begins and ends, as token ids, for `thinking_token_budget`.


class Thinking(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Made by the front end, which has the tokenizer. The markers of all requests of a model are the same."""

    start: tuple[tuple[int, ...], ...]  # markers that begin reasoning
    end: tuple[tuple[int, ...], ...]  # markers that end it
    forced: tuple[int, ...]  # what is written when the budget is used
    is_open: bool  # whether the prompt ends within reasoning

    @property
    def markers(self) -> tuple[object, ...]:
        return self.start, self.end, self.forced
