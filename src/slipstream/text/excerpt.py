"""Excerpts: how much of a long text must be tokenised to know its first or last tokens, or that it has too many.

A tokenizer takes microseconds and a hundred bytes for each character, so a text far beyond the model length is not read
whole: a beginning is read, and more of it only while it has too few tokens. No more than `max_chars` are ever read.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import pre_tokenizers

from slipstream.errors import InvalidPrompt
from slipstream.text.tokenizer import Tokenizer

_CHARACTERS = 6  # of a text that will be cut: read so many for each token to begin with
MARGIN = 16  # and be sure of the tokens that so many others follow
_TAIL = 256  # tokens at the end of a part whose last word goes on: those before them do not depend on the rest
_MIN_CHARS, _CHARS_EACH = (
    2**20,
    64,
)  # characters read of a text at most: the larger of both, the second for each token
_COMPOSED = 4  # characters that NFC may join into one
_SPACE = re.compile(r"[^\S\x0b\x0c\x1c-\x1f\x85]")  # of any kind but those that BERT leaves out, joining what they part
_GAP = re.compile(r"(?<=[^\W_]) (?=[^\W_])")  # one space between two words: every tokenizer parts them there


class Excerpts:
    """For one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._longest: int | None | bool = True  # True: not looked for yet
        # Unigram weighs all ways to part a word; the others go from left to right, or by ranks of neighbours
        self._weighs = type(tokenizer.backend.model).__name__ == "Unigram"

    def is_short(self, text: str, limit: int) -> bool:
        """Whether reading all of a text costs little more than reading `limit` tokens of it."""
        return len(text) <= first_size(limit)

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text has more than `limit` tokens, without special ones. Short texts are not looked at."""
        if self.is_short(text, limit):
            return False
        if (longest := self.longest_token()) is not None and len(text) > longest * limit:
            return True
        return len(self._beginning(text, limit, exact=False)) < len(text)

    def beginning(self, text: str, limit: int) -> str:
        """A beginning of the text that has the same first `limit` tokens, and more; or all of it."""
        return self._beginning(text, limit, exact=self._weighs)

    def _beginning(self, text: str, limit: int, *, exact: bool) -> str:
        """`exact`: nothing is taken for certain of a word that goes on, until no more may be read."""
        size, most = first_size(limit), max_chars(limit)
        while len(text) > size:
            part = before_space(text, size)
            if part is not None:
                num = len(self.tokenizer.encode(part, add_special_tokens=False))
            else:
                part = text[:size]
                num = self._num_sure(part, exact=exact and size < most)
            if num >= limit + MARGIN:
                return part
            if size >= most:
                raise _has_too_few(size, num)
            size = min(4 * size, most)
        return text

    def end(self, text: str, limit: int) -> str:
        """An end of the text that has the same last `limit` tokens, and more; or all of it.

        It begins between two words. Where there is no such place all of the text is needed: inside of a word, where
        tokens end depends on where it began.
        """
        size, most = first_size(limit), max_chars(limit)
        while len(text) > size:
            num, start = 0, len(text) - size
            if (gap := _GAP.search(text, start, start + size // 2)) is not None:
                part = text[gap.start() :]
                num = len(self.tokenizer.encode(part, add_special_tokens=False))
            if num >= limit + MARGIN:
                return part
            if size >= most:
                raise _has_too_few(size, num)
            size = min(4 * size, most)
        return text

    def longest_token(self) -> int | None:
        """Characters that one token can stand for at most; None where that is not certain."""
        if self._longest is True:
            self._longest = _longest_token(self.tokenizer)
        return self._longest

    def _num_sure(self, part: str, *, exact: bool) -> int:
        """Tokens of a text cut off anywhere that do not depend on how it went on: those before its last word, as the
        tokenizer sees words, and unless `exact` those of a very long word that are far from the cut."""
        words: list[int | None] = self.tokenizer.encodings([part], add_special_tokens=False, words=True)[0].word_ids
        num = sum(word != words[-1] for word in words)
        return num if exact else max(num, len(words) - _TAIL)


def first_size(limit: int) -> int:
    """Characters that are read of a text to begin with."""
    return _CHARACTERS * (limit + 2 * MARGIN)


def max_chars(limit: int) -> int:
    """Characters that are read of a text at most."""
    return max(_MIN_CHARS, _CHARS_EACH * limit)


def before_space(text: str, size: int) -> str | None:
    """About so many characters of a text, up to a space: no token reaches over one. None: there is none to end at."""
    spaces = [space.start() for space in _SPACE.finditer(text, size // 2, size)]
    return text[: spaces[-1]].rstrip() if spaces else None


def _has_too_few(size: int, num: int) -> InvalidPrompt:
    return InvalidPrompt(
        f"of {size} characters of the text, which are as many as are read, the tokenizer makes {num} tokens; leave out "
        "runs of spaces and words without end, send less, or send token ids"
    )


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Byte-level BPE makes a token of every byte that nothing else is made of: a text of n bytes has at least n divided
    by the longest token. Other tokenizers drop or join characters without a bound (spaces, accents, unknown words)."""
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
    """Whether a pre-tokenizer turns all of a text into bytes."""
    parts = [] if spec is None else spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    kinds = {part["type"] for part in parts}
    removes = any(part.get("behavior") == "Removed" for part in parts)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Digits", "Split"} and not removes


def _state(component: Any) -> dict[str, Any] | None:
    """A part of a tokenizer in the words of tokenizer.json."""
    state: dict[str, Any] | None = component and json.loads(component.__getstate__())
    return state
