"""Detokenizer: converts token ids to text incrementally; returned text never changes.

A tokenizer.json decodes pieces of its vocabulary by a chain of decoders. Here each common decoder has an incremental
form, which returns text as soon as later pieces cannot change it. The increments together equal the text of decoding
all ids at once, and the cost per token does not depend on the length of the output.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from slipstream.text.tokenizer import Tokenizer, fallback_byte, letter_bytes


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

    def num_pending(self) -> int:
        """The number of characters in the bytes held back, if the bytes that follow are valid."""
        return sum(step.num_pending() for step in self._steps or () if isinstance(step, _ByteFallback))

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

    def num_pending(self) -> int:
        return len(codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self.run)))

    def finish(self) -> Iterator[str]:
        if self.run:
            try:
                yield self.run.decode()
            except UnicodeDecodeError:
                yield "\ufffd" * len(self.run)
            self.run.clear()


# StopMatcher: finds stop strings in a text that arrives in increments.
#
# The stop string that is complete first ends the text, and of two that end at the same offset the longer. So the result
# does not depend on the increments.


class _Prefix:
    """The first `depth` characters of the sorted stop strings from `first` to `end`: a state of the automaton."""

    __slots__ = ("depth", "first", "end", "longer", "shorter", "match")

    def __init__(self, depth: int, first: int, end: int) -> None:
        self.depth, self.first, self.end = depth, first, end
        self.longer: dict[str, _Prefix | None] = {}  # by the next character; None where no stop string goes on so
        self.shorter: _Prefix | None = None  # the longest proper suffix that is a prefix too; None for the empty one
        self.match: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Holds back text that may be the beginning of a stop string.

    An Aho-Corasick automaton: its state is the longest suffix of the text that is a prefix of a stop string. States are
    made when a text first reaches them, so a request pays for its text and not for the length of its stop strings.
    """

    __slots__ = ("matched", "_stops", "_include", "_root", "_state", "_pending")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops), f"an empty stop string would match everywhere: {stops}"
        self.matched: str | None = None  # the stop string that was found
        self._stops = sorted(set(stops))
        self._include = include_stop
        self._root = self._state = _Prefix(0, 0, len(self._stops))
        self._pending = ""

    def push(self, text: str) -> str:
        """Adds text and returns what cannot be part of a stop string. Returns nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        state = self._state
        for index, character in enumerate(text):
            state = state.longer.get(character) or self._next(state, character)
            if state.match is not None:
                end, self.matched = len(self._pending) + index + 1, state.match
                shown = (self._pending + text)[: end if self._include else end - len(state.match)]
                self._pending = ""
                return shown
        self._state, text = state, self._pending + text
        certain = len(text) - state.depth
        self._pending = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the text."""
        pending, self._pending, self._state = self._pending, "", self._root
        return pending

    def _next(self, state: _Prefix, character: str) -> _Prefix:
        """The state after one more character. Makes it and those it refers to, where they are new."""
        new: list[_Prefix] = []  # from the longest to the shortest; each is the `shorter` of the one before
        suffix: _Prefix | None = state
        while suffix is not None:
            found = suffix.longer.get(character)
            if found is None and character not in suffix.longer:
                found = suffix.longer[character] = self._extend(suffix, character)
                if found is not None:
                    new.append(found)
            elif found is not None:
                break
            suffix = suffix.shorter
        else:
            found = self._root
        for prefix in reversed(new):
            assert found is not None
            prefix.shorter, prefix.match = found, prefix.match or found.match
            found = prefix
        assert found is not None
        return found

    def _extend(self, prefix: _Prefix, character: str) -> _Prefix | None:
        """The prefix with one more character, or None if no stop string begins so."""
        stops, depth, end = self._stops, prefix.depth, prefix.end
        # none of them ends here: the text would have ended too
        first = bisect_left(stops, character, prefix.first, end, key=lambda stop: stop[depth])
        end = bisect_right(stops, character, first, end, key=lambda stop: stop[depth])
        if first == end:
            return None
        longer = _Prefix(depth + 1, first, end)
        if len(stops[first]) == depth + 1:
            longer.match = stops[first]
        return longer


# TokenStarts: the offset of each token in the detokenised text.
#
# The text of a token is from its start to the next start. A token that ends within a character adds nothing, and the
# character belongs to the token that completes it. Special tokens that are not part of the text add nothing either.

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
        self._last = max(self._last, self._length + detokenizer.num_pending())
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
