"""CompiledGrammar: a grammar in its first state, which sessions copy.

Copies of an `LLMatcher` share the states of its lexer under a mutex. A copy of a `NativeMatcher` has its own, so that
threads do not wait for each other; then the matchers of ended sessions are used again, because their lexers have states
that a new copy would compute again.
"""

from __future__ import annotations

import threading
from typing import Protocol, Self

MAX_USES = 32
"""Sessions that use a matcher one after another: the states of its lexer are never freed, and limited."""


class Matcher(Protocol):
    """The methods of `llguidance.LLMatcher` that sessions use."""

    def deep_copy(self) -> Self: ...
    def reset(self) -> bool: ...
    def is_error(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def get_error(self) -> str: ...
    def consume_token(self, token: int) -> bool: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


class CompiledGrammar:
    def __init__(self, first: Matcher, max_spares: int = 0) -> None:
        """`max_spares`: matchers of ended sessions that are kept."""
        self.first = first
        self.forced = first.compute_ff_tokens()  # in the first state
        self._max_spares = max_spares
        self._spares: list[tuple[Matcher, int]] = []  # with the number of uses
        self._lock = threading.Lock()

    def open(self) -> tuple[Matcher, int]:
        """A matcher in the first state, and how many sessions have used it."""
        with self._lock:
            if self._spares:
                return self._spares.pop()
        return self.first.deep_copy(), 0

    def give_back(self, matcher: Matcher, num_uses: int) -> None:
        """A session has ended: keep its matcher for another one."""
        if len(self._spares) < self._max_spares and num_uses < MAX_USES and matcher.reset():
            with self._lock:
                self._spares.append((matcher, num_uses))

    def drop_spares(self) -> None:
        with self._lock:
            self._spares.clear()
