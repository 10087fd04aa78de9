"""Detokenizer: token ids to text, in increments that never change afterwards.

A tokenizer turns pieces of its vocabulary into text by a chain of small decoders. Here each of the usual ones has a
form that takes pieces one by one and gives text as soon as nothing that follows can alter it. All increments together
are exactly what decoding all ids at once gives, and each token costs the same, however long the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from slipstream.text.token_bytes import fallback_byte, letter_bytes
from slipstream.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output.

    Some decoders put a space between tokens. Where special tokens are shown, `spaces_between_special_tokens=False`
    leaves it out between two of them; byte-level tokenizers never had it.
    """

    __slots__ = ("_tokenizer", "_skipped", "_steps", "_unmodelled", "_joined", "_last_joined")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        # a special token directly after another is written as it is
        self._joined: frozenset[int] = frozenset() if spaces_between_special_tokens else tokenizer.special_ids
        self._last_joined = False
        self._steps = _steps(tokenizer.decoder_spec)
        # a decoder that we cannot follow piece by piece decodes once, at the end
        self._unmodelled: list[int] | None = [] if self._steps is None else None

    def push(self, ids: list[int]) -> str:
        """The text that these ids made certain."""
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
        """Whether text comes before the end."""
        return self._steps is not None

    def num_held(self) -> int:
        """Characters that bytes held back make already, if those that follow are as they should be."""
        return sum(step.num_held() for step in self._steps or () if isinstance(step, _ByteFallback))

    def finish(self) -> str:
        """No more ids will come: the rest."""
        if self._steps is None:
            assert self._unmodelled is not None
            return self._tokenizer.decode(self._unmodelled, skip_special_tokens=False)
        rest: list[str] = []
        for step in self._steps:
            rest = [*step.push(rest), *step.finish()]
        return "".join(rest)


class _Step(Protocol):
    """One decoder of the chain. `push` takes pieces in order and gives those that are certain."""

    def push(self, pieces: Iterable[str]) -> Iterable[str]: ...
    def finish(self) -> Iterable[str]: ...


def _steps(spec: dict[str, Any] | None) -> list[_Step] | None:
    """The chain for a decoder of tokenizer.json, or None if it holds one that is not modelled here."""
    if spec is None:
        return [_Spaced()]
    chain = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    steps: list[_Step] = []
    is_fused = False  # from here on all pieces count as one
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
    """Joins pieces; the text is the same, only what follows sees it as one."""

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        return pieces


class _Replace(_Stateless):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        return [piece.replace(self.old, self.new) for piece in pieces]


class _Spaced(_Stateless):
    """No decoder at all: pieces with spaces between."""

    def __init__(self) -> None:
        self.space = ""

    def push(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            yield self.space + piece
            self.space = " "


class _Metaspace(_Stateless):
    """Marks are spaces; those of the first piece were only put there by encoding."""

    def __init__(self, mark: str, scheme: str) -> None:
        self.mark = mark
        self.space = " " if scheme == "never" else ""

    def push(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece.replace(self.mark, self.space)
            self.space = " "


class _StripStart(_Stateless):
    """Takes up to `count` characters from the beginning of the text."""

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
    """Each character of a piece is a byte; a character split over pieces appears when its last byte comes."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        return (self.decoder.decode(b"".join(map(letter_bytes, pieces))),)

    def finish(self) -> Iterable[str]:
        return (self.decoder.decode(b"", final=True),)


class _ByteFallback:
    """Pieces like <0xE2> are bytes. A run of them is valid as a whole or not at all, so it is held until it ends."""

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
