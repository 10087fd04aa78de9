"""TokenStarts: the offset of each token in the detokenised text.

The text of a token is from its start to the next start. A token that ends within a character adds nothing, and the
character belongs to the token that completes it. Special tokens that are not part of the text add nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.text.detokenizer import Detokenizer
from slipstream.text.tokenizer import Tokenizer

_CONTEXT = 8  # preceding tokens that determine the text of a token, for decoders without an incremental form


class TokenStarts:
    """The offsets of tokens that arrive in increments. The cost per token does not depend on the length of the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """`start`: the length of the text before the first token."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        self._length = self._last = start
        self._recent: list[int] = []

    def push(self, ids: Sequence[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
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
    """Returns the offsets of a prompt's tokens in its text, which was given or is decoded from them."""
    starts = TokenStarts(tokenizer).push(ids)
    if tokenizer.decode(ids) == text:
        return starts
    # the tokenizer normalised the text, or the text has special tokens: use the offsets of its encoding
    (encoding,) = tokenizer.encodings([text], add_special_tokens, words=True)
    if encoding.ids == ids:
        starts, end = [], 0
        for first, last in encoding.offsets:
            if last == first:  # a special token that was added
                starts.append(end)
                continue
            while first > end and text[first - 1].isspace():
                first -= 1  # spaces without a token belong to the token after them
            starts.append(max(first, starts[-1]) if starts else first)
            end = max(end, last)
    return [min(start, len(text)) for start in starts]
