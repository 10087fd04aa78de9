"""Texts to the token ids that a pooling model reads: cut to a length, alone or in pairs, and no more read than needed.

Special tokens stay when a text is cut: the tokens that begin and end it are the model's, not the text's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slipstream.text.tokenizer import Tokenizer

_CHARACTERS = 6  # of a text that will be cut: read so many for each token to begin with
_MARGIN = 16  # and be sure of the tokens that so many others follow
_SPACE = re.compile(r"[^\S\x0b\x0c\x1c-\x1f\x85]")  # of any kind but those that BERT leaves out, joining what they part


class Pieces:
    """Encodes texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._num_before, self._num_after = _num_special(tokenizer)
        self._num_in_pair: int = tokenizer.backend.num_special_tokens_to_add(is_pair=True)

    def texts(self, texts: Sequence[str], limit: int | None, *, side: str = "right") -> list[list[int]]:
        """Ids of each text, at most `limit` of them; `side` is where others are cut off."""
        if limit is None:
            return self.tokenizer.encode_batch(texts)
        if side == "left":  # its end decides, so all of it is read
            found = self.tokenizer.encode_batch(texts)
            return [self._cut_left(ids, limit) if len(ids) > limit else ids for ids in found]
        short = [self._beginning(text, limit) for text in texts]
        found = self.tokenizer.encode_batch(short)
        for place, ids in enumerate(found):
            if len(ids) < limit + _MARGIN and len(short[place]) < len(texts[place]):
                ids = self.tokenizer.encode(self._enough(texts[place], limit))
            if len(ids) > limit:
                ids = self._cut(ids, limit)
            found[place] = ids
        return found

    def pairs(
        self, pairs: Sequence[tuple[str, str]], limit: int | None, *, side: str = "right"
    ) -> list[tuple[list[int], int | None]]:
        """Ids of two texts as one prompt, and where token type 1 begins; None where all have type 0.

        A pair that is too long loses tokens of its longer text first.
        """
        short = pairs
        if limit is not None and side == "right":
            short = [(self._enough(first, limit), self._enough(second, limit)) for first, second in pairs]
        found = []
        for place, encoding in enumerate(self.tokenizer.encodings(short)):
            if limit is not None and len(encoding.ids) > limit:
                encoding = self._cut_pair(*short[place], limit, side)
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

    def _enough(self, text: str, limit: int) -> str:
        """A beginning of the text that has the same first `limit` tokens."""
        size = _size(limit)
        while len(text) > size:
            part = _before_space(text, size)
            if part is not None:
                num = len(self.tokenizer.encode(part, add_special_tokens=False))
            else:
                part = text[:size]
                num = self._num_sure(part)
            if num >= limit + _MARGIN:
                return part
            if not num:  # all of it is one word
                break
            size *= 4
        return text

    def _beginning(self, text: str, limit: int) -> str:
        """About as much of it as `limit` tokens come from; enough where there is no space to end at."""
        size = _size(limit)
        if len(text) <= size:
            return text
        part = _before_space(text, size)
        return self._enough(text, limit) if part is None else part

    def _num_sure(self, part: str) -> int:
        """Tokens of a text cut off anywhere that do not depend on how it went on: those before its last word, as the
        tokenizer sees words. One that sees none is sure of nothing."""
        words = self.tokenizer.encodings([part], add_special_tokens=False, words=True)[0].word_ids
        return sum(word != words[-1] for word in words)


def type_start(types: Sequence[int]) -> int | None:
    """Token types as one number: the first place of type 1. Whoever calls has types that are 0 first and then 1."""
    ones = sum(types)
    return len(types) - ones if ones else None


def _share(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens each of two texts keeps: the shorter all of its own while that is at most half."""
    if first + second <= room:
        return first, second
    half = room // 2
    if min(first, second) <= half:
        return (first, room - first) if first <= second else (room - second, second)
    # an odd one goes to the longer; to the second where both would fill the room, and how much longer is not known
    return (room - half, half) if first > second < room else (half, room - half)


def _size(limit: int) -> int:
    return _CHARACTERS * (limit + 2 * _MARGIN)


def _before_space(text: str, size: int) -> str | None:
    """About so many characters of a text, up to a space: no token reaches over one. None: there is none to end at."""
    spaces = [space.start() for space in _SPACE.finditer(text, size // 2, size)]
    return text[: spaces[-1]].rstrip() if spaces else None


def _num_special(tokenizer: Tokenizer) -> tuple[int, int]:
    """Special tokens before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    for before in range(len(whole) - len(bare) + 1):
        if whole[before : before + len(bare)] == bare:
            return before, len(whole) - len(bare) - before
    return 0, 0
