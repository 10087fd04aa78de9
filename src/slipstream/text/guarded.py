"""Guarded: a prompt in which the characters of some control tokens are ordinary text, and its encoding.

Control tokens at the given spans become their ids. The same characters elsewhere are encoded as ordinary text, and the
rest of the prompt exactly as the tokenizer encodes it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, SupportsIndex

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from slipstream.base.errors import InvalidPrompt

_TRIES = 8  # attempts to keep the model (for example Unigram) from merging characters into a control token


class TextSpan(NamedTuple):
    """The position of a control token in a text."""

    start: int
    end: int
    token: int


class Guarded(str):
    """Text with control tokens at `spans` and nowhere else."""

    __slots__ = ("spans", "encoder")
    spans: tuple[TextSpan, ...]
    encoder: GuardedEncoder

    def __new__(cls, text: str, spans: Iterable[TextSpan], encoder: GuardedEncoder) -> Guarded:
        made = super().__new__(cls, text)
        made.spans, made.encoder = tuple(spans), encoder
        return made

    def token_ids(self) -> list[int]:
        """Token ids, without the special tokens that a tokenizer adds around a text."""
        return self.encoder.encode(self)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        """A slice is guarded too; a control token that is cut becomes text."""
        part = str.__getitem__(self, key)
        if not isinstance(key, slice):
            return part
        start, stop, step = key.indices(len(self))
        assert step == 1, "a prompt is cut, not rearranged"
        inside = (span for span in self.spans if start <= span.start and span.end <= stop)
        return Guarded(part, (TextSpan(s.start - start, s.end - start, s.token) for s in inside), self.encoder)

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(str.rstrip(self, chars))]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (plain(self),)


def plain(text: str) -> str:
    """Returns a plain str of the text."""
    return str.__str__(text)


@contextmanager
def library_errors(what: str = "encode a prompt") -> Iterator[None]:
    """Raises as InvalidPrompt what the library raises for a text: plain Exceptions, for example for a character without
    a token, and panics, which are no Exceptions, for example at its limit of backtracking in tokenizer.json's regexes.
    """
    try:
        yield
    except InvalidPrompt:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InvalidPrompt(f"the tokenizer cannot {what}: {error}; change its text") from None


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of a library failed."""
    return type(error).__module__ == "pyo3_runtime"


def is_spelled(backend: Backend, token: str, text: str) -> bool:
    """Whether this text contains the token, before or after normalization. False for an unknown character, whose id is
    a special token as well."""
    if token in text or backend.normalizer is None:
        return token in text
    change = backend.normalizer.normalize_str
    with library_errors():
        return change(token) in change(text)


class GuardedEncoder:
    """A copy of a tokenizer in which each control token has a random name that no text contains."""

    def __init__(self, backend: Backend, control: Mapping[int, str]) -> None:
        """`control`: texts of the control tokens, by id."""
        self._control = dict(control)
        self._lock = threading.Lock()
        self._original = backend
        self._copy: Backend | None = None  # built at first use
        self._names: dict[int, str] = {}
        self._id_of: dict[int, int] = {}  # ids of added tokens in the original, by their id in the copy
        self._break = ""  # name of a token that is removed from the ids: it keeps its neighbours from being merged

    def encode(self, text: Guarded) -> list[int]:
        copy = self._made()
        parts: list[str] = []
        offset = 0
        for span in text.spans:
            parts += (str.__getitem__(text, slice(offset, span.start)), self._names[span.token])
            offset = span.end
        written = "".join(parts) + str.__getitem__(text, slice(offset, None))
        for _ in range(_TRIES):
            with library_errors():
                found = copy.encode(written, add_special_tokens=False)
            joined = [
                start + 1
                for token, (start, end) in zip(found.ids, found.offsets, strict=True)
                if token not in self._id_of and end - start > 1 and self._is_spelled(token, written[start:end])
            ]
            if not joined:
                break
            for start in reversed(joined):
                written = written[:start] + self._break + written[start:]
        else:
            raise InvalidPrompt(
                "the text of a message has control tokens that this vocabulary cannot encode as text; remove them"
            )
        ids = (self._id_of.get(token, token) for token in found.ids)
        return [token for token in ids if token >= 0]

    def _is_spelled(self, token: int, text: str) -> bool:
        return token in self._control and is_spelled(self._original, self._control[token], text)

    def _made(self) -> Backend:
        with self._lock:
            if self._copy is None:
                self._copy = self._make()
            return self._copy

    def _make(self) -> Backend:
        original = self._original
        copy = Backend(original.model)
        for name in ("normalizer", "pre_tokenizer"):
            if (own := getattr(original, name)) is not None:
                setattr(copy, name, own)
        nonce = "".join(chr(0x13000 + secrets.randbelow(1024)) for _ in range(8))  # letters that no normalizer changes
        added = sorted(original.get_added_tokens_decoder().items())
        for number, (token, known) in enumerate(added):
            is_control = token in self._control
            text = f"{nonce}{number}." if is_control else known.content
            flags = {name: getattr(known, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            made = AddedToken(text, special=known.special, **flags)
            (copy.add_special_tokens if known.special else copy.add_tokens)([made])
            if is_control:
                self._names[token] = text
            self._note(copy, text, token)
        self._break = f"{nonce}-"
        copy.add_special_tokens([AddedToken(self._break, special=True, normalized=False)])
        self._note(copy, self._break, -1)
        return copy

    def _note(self, copy: Backend, text: str, token: int) -> None:
        own = copy.token_to_id(text)
        assert own is not None, f"{text!r} was just added"
        self._id_of[own] = token
