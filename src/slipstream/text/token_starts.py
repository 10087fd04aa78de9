"""TokenStarts: where each token begins in the text that it became part of.

The offsets slice the text: from one token's start to the next one's is what the token added. A token that ends within a
character adds nothing, and the character belongs to the token that completes it. Special tokens that the text leaves
out add nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.text.detokenizer import Detokenizer
from slipstream.text.tokenizer import Tokenizer

_CONTEXT = 8  # tokens before one that tell what it adds, where a decoder cannot be followed token by token


class TokenStarts:
    """Of a text whose tokens come in increments. Each token costs the same, however long the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """`start`: the length of what stands before the text."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        self._length = self._last = start
        self._recent: list[int] = []

    def push(self, ids: Sequence[int]) -> list[int]:
        """The starts of the next tokens."""
        return [self._push(token) for token in ids]

    def _push(self, token: int) -> int:
        detokenizer = self._detokenizer
        self._last = max(self._last, self._length + detokenizer.num_held())
        if detokenizer.is_incremental:
            self._length += len(detokenizer.push([token]))
            return self._last
        longer = [*self._recent, token]
        self._length += max(0, len(self._decode(longer)) - len(self._decode(self._recent)))
        self._recent = longer[-_CONTEXT:]
        return self._last

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)


def prompt_starts(tokenizer: Tokenizer, ids: list[int], text: str, *, add_special_tokens: bool) -> list[int]:
    """Where a prompt's tokens begin in its text, which was given or decoded from them."""
    starts = TokenStarts(tokenizer).push(ids)
    if tokenizer.decode(ids) == text:
        return starts
    # the tokenizer changed the text, or the text spells special tokens: it knows where each token came from
    (encoding,) = tokenizer.encodings([text], add_special_tokens, words=True)
    if encoding.ids == ids:
        starts, end = [], 0
        for first, last in encoding.offsets:
            if last == first:  # added around the text
                starts.append(end)
                continue
            while first > end and text[first - 1].isspace():
                first -= 1  # spaces that belong to no token go with the one after them
            starts.append(max(first, starts[-1]) if starts else first)
            end = max(end, last)
    return [min(start, len(text)) for start in starts]
