"""Session: the state of one sample's grammar. It follows the true tokens of the request, never placeholders."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.contracts.step import Ints

Words = NDArray[np.uint32]
SLOW_SPAN = 8  # tokens


class MaskJob(Protocol):
    """Fills a mask in the background. Until it is done, nothing else uses the matcher of the session."""

    def done(self) -> bool: ...
    def result(self) -> None: ...


class Session:
    """Forced tokens are the next tokens where the grammar leaves no choice. They are the output also where the model
    would spell the same text by other tokens, so that it does not matter whether they are drawn or appended."""

    __slots__ = (
        "matcher", "tokens", "num_taken", "forced", "is_complete", "is_slow", "ready", "job", "drafts", "num_proposed",
        "grammar", "pointers", "mask_index", "has_mask", "_slow_at", "_num_uses", "_num_prompt", "_stop_ids",
        "_stop_bits", "_end",
    )  # fmt: skip

    def __init__(
        self, grammar: CompiledGrammar, tokens: list[int], num_prompt: int, stop_ids: Iterable[int], end: int
    ) -> None:
        """`tokens`: of the request, prompt included; the list grows. `end`: the token that means the end of the
        grammar."""
        self.grammar = grammar
        self.matcher: Matcher
        self.matcher, self._num_uses = grammar.open()
        self.pointers = getattr(self.matcher, "pointers", (0, 0))  # for the threads of native.c
        self.tokens = tokens
        self.num_taken = num_prompt  # tokens of the request that the state has seen
        self.forced = list(grammar.forced)
        self.is_complete = False  # no further token is possible
        self.is_slow = False  # its masks take longer than a step: it is planned only when its mask is known
        self._slow_at = -SLOW_SPAN - 1  # tokens taken when a mask last took longer than a step
        self.ready: Words | None = None  # the mask of the present state, if a background thread has filled it
        self.job: MaskJob | None = None  # which fills it
        self.drafts: list[int] = []  # that the device has proposed for the row's next step; -1: none
        self.mask_index = -1  # of the row's draw in the newest plan; -1: none, or several
        self.has_mask = False  # the mask with this index is filled
        self.num_proposed = 0  # drafts that the row's newest plan proposes: the next one may have as many
        self._num_prompt = num_prompt
        self._stop_ids = tuple(stop_ids)
        self._stop_bits = [(token >> 5, np.uint32(1 << (token & 31))) for token in self._stop_ids]
        self._end = end

    def close(self) -> None:
        """The request has ended: the grammar gets the matcher back. Nothing may use the session any more, except
        `masks_at`."""
        self.grammar.give_back(self.matcher, self._num_uses + 1)
        del self.matcher

    @property
    def error(self) -> str:
        """The reason why no token is possible; empty if one is."""
        return self.matcher.get_error().replace("<non-verbose/>", "").strip()

    def note_slow(self) -> None:
        """A mask took longer than a step. Most are the first of their kind, so a session is slow if this happens again
        soon."""
        self.is_slow = self.num_taken - self._slow_at <= SLOW_SPAN
        self._slow_at = self.num_taken

    @property
    def is_busy(self) -> bool:
        """Whether a thread uses the matcher."""
        return self.job is not None and not self.job.done()

    def catch_up(self) -> None:
        """Take the tokens that the request has got since the last call."""
        num = len(self.tokens) - self.num_taken
        if num == 1:
            self.take_one(self.tokens[-1])
        elif num:
            self.take(self.tokens[self.num_taken :])

    def take_one(self, token: int) -> None:
        """Take a token that was drawn, and find the forced tokens after it."""
        matcher, forced = self.matcher, self.forced
        self.num_taken += 1
        matcher.consume_token(token)
        if forced:
            del forced[0]
        if self.job is not None:
            self.ready = self.job = None
        if matcher.is_stopped():
            self.is_complete = not matcher.is_error()  # an error gives an empty mask
        elif not forced:
            self.forced = matcher.compute_ff_tokens()

    def take(self, tokens: Iterable[int]) -> None:
        """Take tokens that were drawn, or appended because they are forced, and find the forced tokens after them."""
        for token in tokens:
            self.take_one(token)

    def take_accepted(self, tokens: list[int], stop_ids: Container[int]) -> None:
        """Take the tokens that a row with drafts has drawn, up to one that ends the request. Tokens after the end of
        the grammar are removed from the list: without drafts they would not have been drawn."""
        for index, token in enumerate(tokens):
            if token in stop_ids:
                return
            self.take_one(token)
            if self.is_complete:
                del tokens[index + 1 :]
                return

    def fill(self, mask: Words, matcher: Matcher | None = None) -> None:
        """Compute the mask [words] of a state without forced tokens: that of the session, or of a copy of its matcher
        that has taken drafts."""
        matcher = matcher or self.matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check_end(mask, matcher)

    def check_end(self, mask: Words, matcher: Matcher) -> None:
        """Finish a mask that the matcher has computed. The bit of the end is set if the grammar may end: then tokens
        that end the request are allowed. After an error only this bit is set: then no token is allowed."""
        if mask[self._end >> 5] & np.uint32(1 << (self._end & 31)):
            if matcher.is_error():
                mask.fill(0)
            else:
                self.allow_end(mask)

    def write_forced(self, mask: Words, token: int) -> None:
        """Allow only this forced token."""
        mask.fill(0)
        mask[token >> 5] = np.uint32(1 << (token & 31))

    def allow_end(self, mask: Words) -> None:
        """The grammar may end here: allow the tokens that end the request."""
        for word, bit in self._stop_bits:
            mask[word] |= bit

    def masks_at(self, lengths: Sequence[int], num_words: int) -> list[Ints]:
        """See `MaskSource`. The state of this session does not change."""
        again = Session(self.grammar, self.tokens, self._num_prompt, self._stop_ids, self._end)
        masks: list[Ints] = []
        for length in lengths:
            again.take(self.tokens[again.num_taken : length])
            mask = np.zeros(num_words, np.uint32)
            if again.forced:
                again.write_forced(mask, again.forced[0])
            else:
                again.fill(mask)
            masks.append(mask.view(np.int32))
        return masks


# CompiledGrammar: a grammar in its first state, which sessions copy.
#
# Copies of an `LLMatcher` share the states of its lexer under a mutex. A copy of a `NativeMatcher` has its own, so that
# threads do not wait for each other; then the matchers of ended sessions are used again, because their lexers have
# states that a new copy would compute again.

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
