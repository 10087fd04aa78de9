"""Session: the state of one sample's grammar. It follows the true tokens of the request, never placeholders."""

from __future__ import annotations

from collections.abc import Container, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = NDArray[np.uint32]


class Session:
    """Forced tokens are the next tokens where the grammar leaves no choice. They are the output also where the model
    would spell the same text by other tokens, so that it does not matter whether they are drawn or appended."""

    __slots__ = (
        "matcher", "num_taken", "forced", "is_complete", "is_slow", "ready", "job", "drafts", "num_proposed",
        "_stop_bits",
    )  # fmt: skip

    def __init__(self, grammar: LLMatcher, num_prompt: int, stop_ids: Iterable[int]) -> None:
        self.matcher = grammar.deep_copy()
        self.num_taken = num_prompt  # tokens of the request, prompt included, that the state has seen
        self.forced: list[int] = self.matcher.compute_ff_tokens()
        self.is_complete = False  # no further token is possible
        self.is_slow = False  # its masks take longer than a step: it is planned only when its mask is known
        self.ready: Words | None = None  # the mask of the present state, if a background thread has filled it
        self.job: Future[None] | None = None  # which fills it
        self.drafts: list[int] = []  # that the device has proposed for the row's next step; -1: none
        self.num_proposed = 0  # drafts that the row's newest plan proposes: the next one may have as many
        self._stop_bits = [(token >> 5, np.uint32(1 << (token & 31))) for token in stop_ids]

    @property
    def error(self) -> str:
        """Why no token is possible; empty if the state is fine."""
        return self.matcher.get_error().replace("<non-verbose/>", "").strip()

    def take(self, tokens: list[int]) -> None:
        """Take tokens that were drawn, or appended because they are forced, and find the forced tokens after them."""
        self.num_taken += len(tokens)
        if len(tokens) == 1:
            self.matcher.consume_token(tokens[0])
        else:
            self.matcher.consume_tokens(tokens)
        del self.forced[: len(tokens)]
        self.ready = self.job = None
        self.is_complete = self.matcher.is_stopped() and not self.matcher.is_error()  # an error gives an empty mask
        if not self.forced:
            self.forced = self.matcher.compute_ff_tokens()

    def take_accepted(self, tokens: list[int], stop_ids: Container[int]) -> None:
        """Take the tokens that a row with drafts has drawn, up to one that ends the request. Tokens after the end of
        the grammar are removed from the list: without drafts they would not have been drawn."""
        for index, token in enumerate(tokens):
            if token in stop_ids:
                return
            self.take([token])
            if self.is_complete:
                del tokens[index + 1 :]
                return

    def write_forced(self, mask: Words, token: int) -> None:
        """Allow only this forced token."""
        mask.fill(0)
        mask[token >> 5] = np.uint32(1 << (token & 31))

    def fill(self, mask: Words, end: int, matcher: LLMatcher | None = None) -> None:
        """Write the mask of a state: that of the session, or of a copy of its matcher that has taken drafts. `end`: the
        bit that means that the grammar may end. After an error no token is allowed."""
        matcher = matcher or self.matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            mask.fill(0)
        elif mask[end >> 5] & np.uint32(1 << (end & 31)):
            self.allow_end(mask)

    def allow_end(self, mask: Words) -> None:
        """The grammar may end here: allow the tokens that end the request."""
        for word, bit in self._stop_bits:
            mask[word] |= bit
