"""Logprobs as they came, in bytes, and as people read them: a list of dicts, each made when somebody looks at it.

Few of the logprobs that are asked for are ever looked at, and to make objects of them takes longer than a step does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

from slipstream.frontend.results import Logprob
from slipstream.messages import LOGPROB
from slipstream.text.tokenizer import Tokenizer

TextOf = Callable[[int], str | None]
Entry = TypeVar("Entry", bound="dict[int, Logprob] | None")

_ENTRY = struct.Struct("<dii")
assert _ENTRY.size == LOGPROB.itemsize


class LogprobStore:
    """What has come so far of one text or prompt; it only grows."""

    __slots__ = ("told", "size", "text_of", "made", "_sum", "_num_summed")

    def __init__(self, num_each: int, text_of: TextOf) -> None:
        """`num_each`: logprobs of each token, its own among them."""
        self.size = num_each * LOGPROB.itemsize
        # LOGPROBs of each token. One array of all would be moved now and then as it grows, those of all rows at once
        self.told: list[bytes] = []
        self.text_of = text_of
        self.made: dict[int, dict[int, Logprob]] = {}  # entries that were looked at, by place
        self._sum = 0.0
        self._num_summed = 0

    def __len__(self) -> int:
        return len(self.told)

    def take(self, data: bytes) -> None:
        """Of the next token, or of several."""
        size = self.size
        if len(data) == size:
            self.told.append(data)
        else:
            assert not len(data) % size, f"{len(data)} bytes came, a token has {size}"
            self.told += [data[start : start + size] for start in range(0, len(data), size)]

    def entry(self, place: int) -> dict[int, Logprob] | None:
        """The token itself first, then the likeliest, then the given ones, whose rank nobody counted.

        Nothing is known of the place before the first.
        """
        if place < 0:
            return None
        entry = self.made.get(place)
        if entry is None:
            entry, text_of = {}, self.text_of
            for logprob, token, rank in _ENTRY.iter_unpack(self.told[place]):
                if token not in entry:
                    entry[token] = Logprob(logprob, rank or None, text_of(token))
            self.made[place] = entry
        return entry

    def cumulative(self) -> float:
        """The sum over the tokens themselves, one after another."""
        for told in self.told[self._num_summed :]:
            self._sum += _ENTRY.unpack_from(told)[0]
        self._num_summed = len(self.told)
        return self._sum


class Logprobs(Sequence[Entry]):
    """Reads as a list of dicts does; what is added to it makes one. It holds on to what it was cut from."""

    __slots__ = ("_store", "_places")

    def __init__(self, store: LogprobStore, places: range) -> None:
        self._store = store
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Logprobs[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | Logprobs[Entry]:
        if isinstance(index, slice):
            return Logprobs(self._store, self._places[index])
        return cast(Entry, self._store.entry(self._places[index]))

    def __iter__(self) -> Iterator[Entry]:
        return cast(Iterator[Entry], map(self._store.entry, self._places))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | Logprobs):
            return len(self) == len(other) and all(mine == yours for mine, yours in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other] if isinstance(other, list | Logprobs) else NotImplemented

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))

    def __copy__(self) -> Logprobs[Entry]:
        return self[:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the tokenizer: with the texts of these tokens."""
        store, places = self._store, self._places
        start = max(0, min(places, default=0))
        stop = 1 + max(places, default=-1)
        told = store.told[start:stop]
        tokens = {token for own in told for _, token, _ in _ENTRY.iter_unpack(own)}
        texts = {token: store.text_of(token) for token in tokens}
        own = range(places.start - start, places.stop - start, places.step)
        made = {place - start: entry for place, entry in store.made.items() if place in places}
        return _restored, (store.size // LOGPROB.itemsize, texts, told, made, own)


def _restored(
    num_each: int, texts: dict[int, str | None], told: list[bytes], made: dict[int, dict[int, Logprob]], places: range
) -> Logprobs[Any]:
    store = LogprobStore(num_each, texts.__getitem__)
    store.told, store.made = told, made
    return Logprobs(store, places)


def texts_of(tokenizer: Tokenizer | None) -> TextOf:
    return _no_text if tokenizer is None else tokenizer.text_of


def _no_text(token: int) -> None:
    return None
