"""Excerpts: the part of a long text that must be tokenised to get its first or last tokens, or to know it is too long.

A tokenizer needs microseconds and about a hundred bytes per character, so a text far beyond the model length is not
tokenised as a whole: first a short part, and a longer one only while it has too few tokens. `max_chars` is the limit.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import pre_tokenizers

from slipstream.errors import InvalidPrompt
from slipstream.text.tokenizer import Tokenizer

_CHARS_PER_TOKEN = 6  # characters of the first part, per token
MARGIN = 16  # a token is final where this many tokens follow it
_TAIL = 256  # tokens at the end of a part that ends inside a word: those before them do not depend on the rest
_MIN_CHARS, _CHARS_EACH = 2**20, 64  # the most characters read of a text: the larger of both, the second per token
_COMPOSED = 4  # characters that NFC can join into one
_SPACE = re.compile(r"[^\S\x0b\x0c\x1c-\x1f\x85]")  # spaces, without those that BERT removes without splitting
_GAP = re.compile(r"(?<=[^\W_]) (?=[^\W_])")  # one space between two words, where every tokenizer splits


class Excerpts:
    """The excerpts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._longest: int | None | bool = True  # True: not computed yet
        # Unigram optimises over a whole word; the others work from left to right, or by ranks of neighbours
        self._is_global = type(tokenizer.backend.model).__name__ == "Unigram"

    def is_short(self, text: str, limit: int) -> bool:
        """Whether tokenising the whole text costs little more than tokenising `limit` tokens of it."""
        return len(text) <= first_size(limit)

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text has more than `limit` tokens, without special ones. False for short texts, unchecked."""
        if self.is_short(text, limit):
            return False
        if (longest := self.longest_token()) is not None and len(text) > longest * limit:
            return True
        return len(self._beginning(text, limit, exact=False)) < len(text)

    def beginning(self, text: str, limit: int) -> str:
        """Returns a beginning of the text with the same first `limit` tokens, or the whole text."""
        return self._beginning(text, limit, exact=self._is_global)

    def _beginning(self, text: str, limit: int, *, exact: bool) -> str:
        """`exact`: tokens of a word that the part cuts are not final, until the limit of characters is reached."""
        size, longest = first_size(limit), max_chars(limit)
        while len(text) > size:
            part = before_space(text, size)
            if part is not None:
                num = len(self.tokenizer.encode(part, add_special_tokens=False))
            else:
                part = text[:size]
                num = self._num_final(part, exact=exact and size < longest)
            if num >= limit + MARGIN:
                return part
            if size >= longest:
                raise _has_too_few(size, num)
            size = min(4 * size, longest)
        return text

    def end(self, text: str, limit: int) -> str:
        """Returns an end of the text with the same last `limit` tokens, or the whole text.

        It begins between two words, since tokens inside a word depend on the start of the word. Without such a boundary
        the whole text is needed.
        """
        size, longest = first_size(limit), max_chars(limit)
        while len(text) > size:
            num, start = 0, len(text) - size
            if (gap := _GAP.search(text, start, start + size // 2)) is not None:
                part = text[gap.start() :]
                num = len(self.tokenizer.encode(part, add_special_tokens=False))
            if num >= limit + MARGIN:
                return part
            if size >= longest:
                raise _has_too_few(size, num)
            size = min(4 * size, longest)
        return text

    def longest_token(self) -> int | None:
        """Maximum number of characters of one token; None if there is no known bound."""
        if self._longest is True:
            self._longest = _longest_token(self.tokenizer)
        return self._longest

    def _num_final(self, part: str, *, exact: bool) -> int:
        """The number of tokens of a part that do not depend on the rest of the text: those before its last word (as the
        pre-tokenizer splits), and unless `exact` those of a very long word that are far from the end."""
        words: list[int | None] = self.tokenizer.encodings([part], add_special_tokens=False, words=True)[0].word_ids
        num = sum(word != words[-1] for word in words)
        return num if exact else max(num, len(words) - _TAIL)


def first_size(limit: int) -> int:
    """The number of characters of the first part."""
    return _CHARS_PER_TOKEN * (limit + 2 * MARGIN)


def max_chars(limit: int) -> int:
    """The most characters that are tokenised of a text."""
    return max(_MIN_CHARS, _CHARS_EACH * limit)


def before_space(text: str, size: int) -> str | None:
    """Returns up to `size` characters of a text, ending at a space, which no token crosses. None: there is no space."""
    spaces = [space.start() for space in _SPACE.finditer(text, size // 2, size)]
    return text[: spaces[-1]].rstrip() if spaces else None


def _has_too_few(size: int, num: int) -> InvalidPrompt:
    return InvalidPrompt(
        f"the first {size} characters of the text, which is the limit, have only {num} tokens; remove runs of spaces "
        "and very long words, send less, or send token ids"
    )


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Byte-level BPE encodes every byte, so a text of n bytes has at least n / longest token. Other tokenizers drop or
    join characters without a bound (spaces, accents, unknown words)."""
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder().values()
    normalizer = _state(backend.normalizer)
    if (
        type(backend.model).__name__ != "BPE"
        or not _keeps_bytes(_state(backend.pre_tokenizer))
        or normalizer not in (None, {"type": "NFC"})
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None
    return max(map(len, vocabulary)) * (1 if normalizer is None else _COMPOSED)


def _keeps_bytes(spec: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer keeps all bytes of a text."""
    parts = [] if spec is None else spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    kinds = {part["type"] for part in parts}
    removes = any(part.get("behavior") == "Removed" for part in parts)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Digits", "Split"} and not removes


def _state(component: Any) -> dict[str, Any] | None:
    """A component of a tokenizer as in tokenizer.json."""
    state: dict[str, Any] | None = component and json.loads(component.__getstate__())
    return state
