"""Encodes texts and pairs for pooling models, truncated to a length, and tokenises no more of a text than needed.

Truncation keeps the special tokens at the start and the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.text.excerpt import MARGIN, Excerpts, before_space, first_size
from slipstream.text.tokenizer import Tokenizer


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
