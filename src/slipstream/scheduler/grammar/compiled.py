"""CompiledGrammar: a grammar in its first state, which sessions copy.

Copies of one matcher share the states of its lexer under a mutex, so sessions of one grammar cannot run in parallel.
A grammar whose masks take long is compiled again, once per thread, and later sessions are distributed over the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CompiledGrammar:
    def __init__(self, make_matcher: Callable[[], LLMatcher]) -> None:
        self._make_matcher = make_matcher
        self._matchers = [make_matcher()]
        self._next = 0
        self._lock = threading.Lock()

    @property
    def num_matchers(self) -> int:
        """Matchers that share nothing."""
        return len(self._matchers)

    def pick(self) -> LLMatcher:
        """The matcher that the next session copies."""
        self._next = (self._next + 1) % len(self._matchers)
        return self._matchers[self._next]

    def grow(self, num_matchers: int) -> None:
        """Compile it until there are so many matchers. In a background thread."""
        with self._lock:
            while len(self._matchers) < num_matchers:
                self._matchers.append(self._make_matcher())
