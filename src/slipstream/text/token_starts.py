"""TokenStarts: the offset of each token in the detokenised text.

The text of a token is from its start to the next start. A token that ends within a character adds nothing, and the
character belongs to the token that completes it. Special tokens that are not part of the text add nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    def push(self, ids: Sequence[int]) -> Iterator[int]:
        """The offsets of the next tokens, each computed when it is read."""
        return map(self._push, ids)

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


class PromptStarts:
    """The offsets of a prompt's tokens in its text, which was given or is decoded from them."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], text: str, *, add_special_tokens: bool) -> None:
        """Runs native code, for long prompts off the event loop."""
        self._tokenizer = tokenizer
        self._ids = ids
        self._length = len(text)
        self._encoded: list[tuple[int, int]] | None = None  # start and end of each token
        self._text = ""
        if tokenizer.decode(ids) != text:
            # the tokenizer normalised the text, or the text has special tokens: use the offsets of its encoding
            (encoding,) = tokenizer.encodings([text], add_special_tokens, words=True)
            if encoding.ids == ids:
                self._encoded, self._text = encoding.offsets, text

    def __iter__(self) -> Iterator[int]:
        starts = TokenStarts(self._tokenizer).push(self._ids) if self._encoded is None else self._by_encoding()
        return (min(start, self._length) for start in starts)

    def _by_encoding(self) -> Iterator[int]:
        text, start, end = self._text, 0, 0
        for first, last in self._encoded or ():
            if last == first:  # a special token that was added
                start = end
            else:
                while first > end and text[first - 1].isspace():
                    first -= 1  # spaces without a token belong to the token after them
                start, end = max(first, start), max(end, last)
            yield start
