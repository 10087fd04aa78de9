"""Detokenizer: converts token ids to text incrementally; returned text never changes.

A tokenizer.json decodes pieces of its vocabulary by a chain of decoders. Here each common decoder has an incremental
form, which returns text as soon as later pieces cannot change it. The increments together equal the text of decoding
all ids at once, and the cost per token does not depend on the length of the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from slipstream.text.token_bytes import fallback_byte, letter_bytes
from slipstream.text.tokenizer import Tokenizer


class Detokenizer:
    """The state of one output.

    Some decoders put a space between tokens. `spaces_between_special_tokens=False` removes it between two special
    tokens; byte-level tokenizers have none.
    """

    __slots__ = ("_tokenizer", "_skipped", "_steps", "_unmodelled", "_joined", "_last_joined")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        # a special token directly after another is not decoded
        self._joined: frozenset[int] = frozenset() if spaces_between_special_tokens else tokenizer.special_ids
        self._last_joined = False
        self._steps = _steps(tokenizer.decoder_spec)
        # a decoder without an incremental form decodes once, at the end
        self._unmodelled: list[int] | None = [] if self._steps is None else None

    def push(self, ids: list[int]) -> str:
        """Adds ids and returns the text that later ids cannot change."""
        kept = [token for token in ids if token not in self._skipped] if self._skipped else ids
        if self._steps is None:
            assert self._unmodelled is not None
            self._unmodelled.extend(kept)
            return ""
        if self._joined:
            return "".join(map(self._push_one, kept))
        return self._push(kept)

    def _push_one(self, token: int) -> str:
        joined = token in self._joined
        as_it_is, self._last_joined = joined and self._last_joined, joined
        return (self._tokenizer.piece(token) or "") if as_it_is else self._push([token])

    def _push(self, ids: list[int]) -> str:
        assert self._steps is not None
        pieces: Iterable[str] = [piece for token in ids if (piece := self._tokenizer.piece(token)) is not None]
        for step in self._steps:
            pieces = step.push(pieces)
        return "".join(pieces)

    @property
    def is_incremental(self) -> bool:
        """Whether `push` returns text, and not only `finish`."""
        return self._steps is not None

    def num_held(self) -> int:
        """The number of characters in the bytes held back, if the bytes that follow are valid."""
        return sum(step.num_held() for step in self._steps or () if isinstance(step, _ByteFallback))

    def finish(self) -> str:
        """Returns the rest of the text, after the last id."""
        if self._steps is None:
            assert self._unmodelled is not None
            return self._tokenizer.decode(self._unmodelled, skip_special_tokens=False)
        rest: list[str] = []
        for step in self._steps:
            rest = [*step.push(rest), *step.finish()]
        return "".join(rest)


class _Step(Protocol):
    """One decoder of the chain. `push` takes pieces in order and returns those that later ones cannot change."""

    def push(self, pieces: Iterable[str]) -> Iterable[str]: ...
    def finish(self) -> Iterable[str]: ...


def _steps(spec: dict[str, Any] | None) -> list[_Step] | None:
    """Returns the chain for a decoder of tokenizer.json, or None if one of it has no incremental form here."""
    if spec is None:
        return [_Spaced()]
    chain = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    steps: list[_Step] = []
    is_fused = False  # whether all pieces are one from here on
    for part in chain:
        step = _step(part, is_fused)
        if step is None:
            return None
        steps.append(step)
        is_fused = is_fused or part["type"] in ("Fuse", "ByteLevel")
    return steps


def _step(spec: dict[str, Any], is_fused: bool) -> _Step | None:
    match spec:
        case {"type": "Fuse"}:
            return _Fuse()
        case {"type": "ByteLevel"} if not is_fused:
            return _ByteLevel()
        case {"type": "ByteFallback"} if not is_fused:
            return _ByteFallback()
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not is_fused:
            return _Metaspace(mark, scheme)
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old and (len(old) == 1 or not is_fused):
            return _Replace(old, new)
        case {"type": "Strip", "content": character, "start": count, "stop": 0} if is_fused:
            return _StripStart(character, count)
    return None


class _Stateless:
    def finish(self) -> Iterable[str]:
        return ()


class _Fuse(_Stateless):
    """Joins pieces into one; the text does not change."""

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        return pieces


class _Replace(_Stateless):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        return [piece.replace(self.old, self.new) for piece in pieces]


class _Spaced(_Stateless):
    """Without a decoder: pieces separated by spaces."""

    def __init__(self) -> None:
        self.space = ""

    def push(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            yield self.space + piece
            self.space = " "


class _Metaspace(_Stateless):
    """Replaces marks by spaces, except in the first piece, where encoding has added them."""

    def __init__(self, mark: str, scheme: str) -> None:
        self.mark = mark
        self.space = " " if scheme == "never" else ""

    def push(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece.replace(self.mark, self.space)
            self.space = " "


class _StripStart(_Stateless):
    """Removes up to `count` characters at the start of the text."""

    def __init__(self, character: str, count: int) -> None:
        self.character, self.count = character, count

    def push(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            while self.count and piece:
                if piece[0] == self.character:
                    piece = piece[1:]
                    self.count -= 1
                else:
                    self.count = 0
            yield piece


class _ByteLevel:
    """Each character of a piece is a byte. A character that is split over pieces is returned with its last byte."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        return (self.decoder.decode(b"".join(map(letter_bytes, pieces))),)

    def finish(self) -> Iterable[str]:
        return (self.decoder.decode(b"", final=True),)


class _ByteFallback:
    """Pieces like <0xE2> are bytes. A run of them is decoded as a whole, so it is held back until it ends."""

    def __init__(self) -> None:
        self.run = bytearray()

    def push(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            if (byte := fallback_byte(piece)) is not None:
                self.run.append(byte)
                continue
            yield from self.finish()
            yield piece

    def num_held(self) -> int:
        return len(codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self.run)))

    def finish(self) -> Iterator[str]:
        if self.run:
            try:
                yield self.run.decode()
            except UnicodeDecodeError:
                yield "\ufffd" * len(self.run)
            self.run.clear()
