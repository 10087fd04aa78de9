"""Keeps text of a request from spelling control tokens in a prompt that a chat template renders.

Control tokens are special tokens, other added tokens with a bar, such as <|fim_prefix|>, and tags that are added tokens
and that the template names, such as <tool_call>. Only the template writes them; tags may also come from messages of the
assistant, because the model generates them.

A template does not report which characters of its output are its own. Therefore `mask` replaces the brackets and bars
in the request's text by stand-ins before the template runs, and `unmask` restores them afterwards: control tokens are
those that can be found while the stand-ins are in place. A stand-in is a lone surrogate, which no valid text contains.
It replaces one character and passes slices, trim, replace, upper and tojson unchanged; `repr` and JSON in ASCII escape
it, which `unmask` reverses. A filter that cannot take it (urlencode) fails, and the request is refused. Whatever a
template does, a masked character never becomes part of a control token.

Tags of the template that are not control tokens stay readable to it ('</think>' in content). Letters are not masked:
where a template writes the brackets itself, '<|' + role + '|>', the token is the template's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from slipstream.base.errors import InvalidPrompt
from slipstream.text.guarded import Guarded, GuardedEncoder, TextSpan, is_spelled, library_errors
from slipstream.text.tokenizer import Tokenizer

_BARS = ("|", "｜")
_BRACKETS = ("<>", "[]", "{}", "()")
_WORDLIKE = "_-/.:"  # occur in control tokens and in ordinary text: not masked
_TAG = re.compile(r"</?\w[\w-]*>")
_STAND_INS = range(0xD8C0, 0xDB40)  # high surrogates of planes 4 to 13, which have no characters: JSON escapes to none
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u(d[89ab][0-9a-f]{2})")
_FILLERS = "█▓▒░"  # replace stand-ins for a tokenizer, which does not accept surrogates

_LONG = 2**20  # characters: of longer prompts only the parts that are needed are searched or encoded

Find = Callable[[str], Iterator[TextSpan]]


class ControlTokens:
    """The control tokens of one tokenizer and one template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        texts = {token: known.content for token, known in added.items() if known.content.strip()}
        strict = {token for token, text in texts.items() if added[token].special or _has_bars(text)}
        self._tags = frozenset(
            token
            for token, text in texts.items()
            if token not in strict and text[0] + text[-1] in _BRACKETS and text in template
        )
        control = {token: texts[token] for token in strict | self._tags}
        self._signs = frozenset(sign for text in control.values() for sign in text if _is_sign(sign))
        self._encoder = GuardedEncoder(tokenizer.backend, control)
        self._find: Find
        self._normalize: Callable[[str], str] | None = None
        if tokenizer.backend.normalizer is not None and any(added[token].normalized for token in control):
            self._normalize = library_errors()(tokenizer.backend.normalizer.normalize_str)
            self._find = _by_encoding(tokenizer, control)
        else:
            words = frozenset(token for token in texts if added[token].single_word)
            self._find = _by_text(texts, words, frozenset(control))
        self._may_remain = self._normalize is not None or any(self._signs.isdisjoint(text) for text in control.values())
        named = set(_TAG.findall(template))
        self._readable = _any_of(named - set(control.values()))
        self._readable_of_model = _any_of(named - {texts[token] for token in strict} | {texts[t] for t in self._tags})
        self._lock = threading.Lock()
        self._stand_ins: dict[str, str] = {}
        self._originals: dict[int, str] = {}
        self._masks: dict[str, bool] = {}  # by character; only with a normalizer

    def mask_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        by_model = message["role"] == "assistant"
        return {self.mask(name): self.mask(value, by_model=by_model) for name, value in message.items()}

    def mask(self, value: Any, *, by_model: bool = False) -> Any:
        """The value with all text in it masked, keys too. Text `by_model` may contain tags that are control tokens."""
        if isinstance(value, str):
            return self._mask_text(value, by_model)
        if isinstance(value, Mapping):
            pairs = ((key, self.mask(item, by_model=by_model)) for key, item in value.items())
            return {self.mask(key, by_model=by_model): item for key, item in pairs}
        if isinstance(value, list | tuple):
            return type(value)(self.mask(item, by_model=by_model) for item in value)
        return value

    def unmask(self, text: str) -> str:
        """A rendered prompt as it is to be encoded: `Guarded` if text of the request spells control tokens."""
        text = self._unescaped(text)
        whole = _replaced(text, self._restoring())
        if whole is text:
            return text
        written = list(self._find(text))
        if len(text) < _LONG and all(one == other for one, other in zip_longest(written, self._find(whole))):
            return whole
        return Guarded(whole, written, self._encoder)

    def restore(self, text: str) -> str:
        return _replaced(self._unescaped(text), self._restoring())

    def _restoring(self) -> list[tuple[str, str]]:
        return [(chr(code), original) for code, original in list(self._originals.items())]

    def _unescaped(self, text: str) -> str:
        def stand_in(found: re.Match[str]) -> str:
            code = int(found[1], 16)
            return chr(code) if code in self._originals else found[0]

        return _ESCAPED.sub(stand_in, text) if "\\ud" in text else text

    def _mask_text(self, text: str, by_model: bool) -> str:
        _check_encodable(text)
        masked = text
        if "\\ud" in text:  # an escape written by the request is not one of ours
            masked = _ESCAPED.sub(self._stand_in("\\") + r"u\1", text)
        parts = [masked]
        if signs := self._signs_in(text):
            table = [(sign, self._stand_in(sign)) for sign in signs]
            readable = self._readable_of_model if by_model else self._readable
            parts = parts if readable is None else readable.split(masked)  # every second part is a tag
            masked = "".join(part if offset % 2 else _replaced(part, table) for offset, part in enumerate(parts))
        return self._without_tokens(masked, by_model) if self._may_remain or len(parts) > 1 else masked

    def _signs_in(self, text: str) -> list[str]:
        if self._normalize is None:
            return [sign for sign in self._signs if sign in text]
        return list(filter(self._is_masked, set(text)))

    def _without_tokens(self, masked: str, by_model: bool) -> str:
        """Masks control tokens that can still be found: letters alone, or characters that together become a sign."""
        while spans := [span for span in self._find(masked) if not (by_model and span.token in self._tags)]:
            pieces: list[str] = []
            offset = 0
            for start, end, _ in spans:
                pieces += (masked[offset:start], *map(self._stand_in, masked[start:end]))
                offset = end
            masked = "".join(pieces) + masked[offset:]
        return masked

    def _is_masked(self, character: str) -> bool:
        """Whether the tokenizer's normalizer makes a sign of the character: NFKC turns "＜" into "<"."""
        if (known := self._masks.get(character)) is None:
            assert self._normalize is not None
            known = self._masks[character] = not self._signs.isdisjoint(character + self._normalize(character))
        return known

    def _stand_in(self, character: str) -> str:
        if ord(character) in _STAND_INS:
            return character
        with self._lock:
            if character not in self._stand_ins:
                if len(self._stand_ins) == len(_STAND_INS):
                    raise InvalidPrompt(
                        f"messages have control tokens in more than {len(_STAND_INS)} characters; remove some, or set "
                        "allow_control_tokens"
                    )
                code = _STAND_INS[len(self._stand_ins)]
                self._originals[code] = character
                self._stand_ins[character] = chr(code)
            return self._stand_ins[character]


def _check_encodable(text: str) -> None:
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise InvalidPrompt("a prompt has an unpaired surrogate, which UTF-8 cannot encode; give valid text") from None


def _replaced(text: str, table: Iterable[tuple[str, str]]) -> str:
    """Replaces characters. Faster than `str.translate`, which looks up every character."""
    for old, new in table:
        text = text.replace(old, new)
    return text


def _has_bars(text: str) -> bool:
    return len(text) > 2 and text[0] + text[-1] in _BRACKETS and any(bar in text for bar in _BARS)


def _is_sign(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character in _WORDLIKE)


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    """A pattern that matches the longest of several texts, with a group for `split`."""
    longest = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})") if texts else None


def _by_text(texts: Mapping[int, str], words: frozenset[int], control: frozenset[int]) -> Find:
    """Finds added tokens as the tokenizer does: the leftmost, and the longest of those; `words` as whole words only."""
    id_of = {text: token for token, text in texts.items()}
    # lengths of the tokens that begin with these two characters, the longest first
    lengths = {
        prefix: sorted({len(text) for text in id_of if text[:2] == prefix or text == prefix[0]}, reverse=True)
        for prefix in {text[:2] for text in id_of}
    }
    begin = re.compile("|".join(map(re.escape, sorted(lengths, key=len, reverse=True))) or r"(?!)")

    def token_at(text: str, start: int, prefix: str) -> TextSpan | None:
        for length in lengths[prefix]:
            token, end = id_of.get(text[start : start + length]), start + length
            if token is not None and not (token in words and _is_inside_word(text, start, end)):
                return TextSpan(start, end, token)
        return None

    def find(text: str) -> Iterator[TextSpan]:
        offset = 0
        while found := begin.search(text, offset):
            span = token_at(text, found.start(), found[0])
            offset = found.start() + 1 if span is None else span.end
            if span is not None and span.token in control:
                yield span

    return find


def _is_inside_word(text: str, start: int, end: int) -> bool:
    return re.match(r"\w", text[start - 1 : start]) is not None or re.match(r"\w", text[end : end + 1]) is not None


def _by_encoding(tokenizer: Tokenizer, control: Mapping[int, str]) -> Find:
    """Finds tokens by encoding, for a tokenizer that searches normalized text, for example in lower case."""
    filler = next(sign for sign in _FILLERS if not any(sign in text for text in control.values()))

    def find(text: str) -> Iterator[TextSpan]:
        if len(text) > _LONG:
            raise InvalidPrompt(
                f"the messages have {len(text)} characters; with this tokenizer {_LONG} can be searched for control "
                "tokens: send less, or set allow_control_tokens"
            )
        text = _SURROGATE.sub(filler, text)
        (encoding,) = tokenizer.encodings([text], add_special_tokens=False, words=True)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in control and is_spelled(tokenizer.backend, control[token], text[start:end]):
                yield TextSpan(start, end, token)

    return find
