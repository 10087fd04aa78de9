"""The vocabulary of a tokenizer as llguidance needs it: the bytes of every token, and the canonical tokens of a text.

The vocabulary has one token more than the model, with the id `vocab_size`: the end of the grammar. So masks do not
depend on the model's own end tokens; each request maps the end to its stop tokens.
"""

from __future__ import annotations

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from slipstream.text.tokenizer import Tokenizer

_MARKER = "\x02"  # before a text, so that tokenizers that add a space add it elsewhere
_MAX_CACHED = 4096  # texts


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """`vocab_size`: of the model. Tokens that the model or the tokenizer lacks are never allowed."""
    source = GrammarVocabulary(tokenizer, vocab_size)
    return LLTokenizer(TokenizerWrapper(source), n_vocab=vocab_size + 1, eos_token=vocab_size)


class GrammarVocabulary:
    """The vocabulary for llguidance: `tokens`, `special_token_ids`, `eos_token_id`, and a call that encodes a text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        num = min(tokenizer.vocab_size, vocab_size)
        self.tokenizer = tokenizer
        # 0xFF is in no text, and llguidance marks special tokens by it
        self.tokens = [b"" if b"\xff" in (own := tokenizer.bytes_of(token)) else own for token in range(num)]
        self.tokens += [b""] * (vocab_size - num) + [b"<end of grammar>"]
        self.special_token_ids = [*sorted(token for token in tokenizer.special_ids if token < num), vocab_size]
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self._special = frozenset(self.special_token_ids)
        self._marker = tokenizer.encode(_MARKER, add_special_tokens=False)
        self._cached: dict[bytes, list[int]] = {}  # a grammar forces the same texts again and again
        self._by_bytes: dict[bytes, int] | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text inside a longer text. Their bytes are always exactly the text's."""
        wanted = text.encode() if isinstance(text, str) else text
        found = self._cached.get(wanted)
        if found is None:
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            found = self._cached[wanted] = self._encode(wanted)
        return found

    def _encode(self, wanted: bytes) -> list[int]:
        text = wanted.decode()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self._is(ids, wanted):
            return ids
        ids = self.tokenizer.encode(_MARKER + text, add_special_tokens=False)
        num = len(self._marker)
        if ids[:num] == self._marker and self._is(ids[num:], wanted):
            return ids[num:]
        return self._longest_first(wanted)

    def _is(self, ids: list[int], wanted: bytes) -> bool:
        known = len(self.tokens) - 1
        if any(token >= known or token in self._special for token in ids):
            return False
        return b"".join([self.tokens[token] for token in ids]) == wanted

    def _longest_first(self, wanted: bytes) -> list[int]:
        """Tokens with exactly these bytes, each the longest possible; nothing if some byte has no token."""
        if self._by_bytes is None:
            plain = ((own, token) for token, own in enumerate(self.tokens) if own and token not in self._special)
            self._by_bytes = dict(plain)
        longest = max(map(len, self._by_bytes), default=0)
        ids: list[int] = []
        while wanted:
            sizes = range(min(longest, len(wanted)), 0, -1)
            size = next((size for size in sizes if wanted[:size] in self._by_bytes), 0)
            if not size:
                return []
            ids.append(self._by_bytes[wanted[:size]])
            wanted = wanted[size:]
        return ids
