"""Excerpts: the part of a long text that must be tokenised to get its first or last tokens, or to know it is too long.

A tokenizer needs microseconds and about a hundred bytes per character, so a text far beyond the model length is not
tokenised as a whole: first a short part, and a longer one only while it has too few tokens. `max_chars` is the limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import pre_tokenizers

from slipstream.base.errors import InvalidPrompt
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


# Encodes texts and pairs for pooling models, truncated to a length, and tokenises no more of a text than needed.
#
# Truncation keeps the special tokens at the start and the end.


class Pieces:
    """Encodes texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.excerpts = Excerpts(tokenizer)
        self._num_before, self._num_after = tokenizer.num_added()
        self._num_in_pair: int = tokenizer.backend.num_special_tokens_to_add(is_pair=True)

    def texts(self, texts: Sequence[str], limit: int | None, *, side: str = "right") -> list[list[int]]:
        """Returns the ids of each text, at most `limit`; `side`: the end that is truncated."""
        if limit is None:
            return self.tokenizer.encode_batch(texts)
        if side == "left":
            found = self.tokenizer.encode_batch([self.excerpts.end(text, limit) for text in texts])
            return [self._cut_left(ids, limit) if len(ids) > limit else ids for ids in found]
        short = [self._beginning(text, limit) for text in texts]
        found = self.tokenizer.encode_batch(short)
        for index, ids in enumerate(found):
            if len(ids) < limit + MARGIN and len(short[index]) < len(texts[index]):
                ids = self.tokenizer.encode(self.excerpts.beginning(texts[index], limit))
            if len(ids) > limit:
                ids = self._cut(ids, limit)
            found[index] = ids
        return found

    def pairs(
        self, pairs: Sequence[tuple[str, str]], limit: int | None, *, side: str = "right"
    ) -> list[tuple[list[int], int | None]]:
        """Returns the ids of two texts as one prompt, and where token type 1 begins; None if all have type 0.

        In a pair that is too long, the longer text is truncated first.
        """
        short = pairs
        if limit is not None:
            part = self.excerpts.end if side == "left" else self.excerpts.beginning
            short = [(part(first, limit), part(second, limit)) for first, second in pairs]
        found = []
        for index, encoding in enumerate(self.tokenizer.encodings(short)):
            if limit is not None and len(encoding.ids) > limit:
                encoding = self._cut_pair(*short[index], limit, side)
            found.append((encoding.ids, type_start(encoding.type_ids)))
        return found

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        if limit <= self._num_before + self._num_after:
            return ids[:limit]
        return ids[: limit - self._num_after] + ids[len(ids) - self._num_after :]

    def _cut_left(self, ids: list[int], limit: int) -> list[int]:
        if limit <= self._num_before + self._num_after:
            return ids[-limit:]
        return ids[: self._num_before] + ids[len(ids) - limit + self._num_before :]

    def _cut_pair(self, first: str, second: str, limit: int, side: str) -> Any:
        room = max(limit - self._num_in_pair, 0)
        parts = self.tokenizer.encodings([first, second], add_special_tokens=False)
        for part, size in zip(parts, _share(len(parts[0].ids), len(parts[1].ids), room), strict=True):
            part.truncate(size, direction=side)
        return self.tokenizer.backend.post_process(parts[0], parts[1], add_special_tokens=True)

    def _beginning(self, text: str, limit: int) -> str:
        """Returns a beginning of a text that usually has `limit` tokens; always, where there is no space to end at."""
        size = first_size(limit)
        if len(text) <= size:
            return text
        part = before_space(text, size)
        return self.excerpts.beginning(text, limit) if part is None else part


def type_start(types: Sequence[int]) -> int | None:
    """Returns the first index of type 1, for types that are zeros followed by ones."""
    ones = sum(types)
    return len(types) - ones if ones else None


def _share(first: int, second: int, room: int) -> tuple[int, int]:
    """The number of tokens that each text keeps. The shorter keeps all of its tokens if they are at most half."""
    if first + second <= room:
        return first, second
    half = room // 2
    if min(first, second) <= half:
        return (first, room - first) if first <= second else (room - second, second)
    # an odd token goes to the longer text; to the second where each alone fills the room
    return (room - half, half) if first > second < room else (half, room - half)
