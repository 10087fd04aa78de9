"""Matchers of llguidance through its C functions, which threads can call without the interpreter lock.

The shared library of the Python package exports them. A `NativeMatcher` has the methods of `llguidance.LLMatcher` that
sessions use, and its masks and forced tokens are the same; `native.c` calls the C functions with its pointer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from slipstream.base.errors import InvalidParams
from slipstream.base.processes import LimitedChild, LimitPassed
from slipstream.config.buffer_size import mask_words
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar import mask_pool
from slipstream.scheduler.grammar.lark_nodes import BadGrammar
from slipstream.scheduler.grammar.mask_pool import llguidance_library
from slipstream.scheduler.grammar.schema_nodes import SchemaNodes, TokenBytes, Walker, schema_nodes
from slipstream.scheduler.grammar.session import CompiledGrammar, Matcher
from slipstream.scheduler.grammar.translate import translate
from slipstream.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_TOKENIZE = ctypes.CFUNCTYPE(_SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE)
_MAX_FORCED = 1 << 16  # tokens; more than the text that a grammar can force


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2: the library reads only the first `struct_size` bytes."""

    _fields_ = [
        ("struct_size", _SIZE),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", _POINTER),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", _POINTER),
        ("slices", _POINTER),
        ("tok_eos_extra", _POINTER),
        ("tok_eos_extra_count", ctypes.c_uint32),
    ]


class _MatcherInit(ctypes.Structure):
    """LlgConstraintInit, with room for fields of later versions."""

    _fields_ = [
        ("tokenizer", _POINTER),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", ctypes.c_uint64 * 6),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
        ("later", ctypes.c_uint64 * 32),
    ]


class NativeVocabulary:
    """A tokenizer of llguidance's C functions."""

    def __init__(self, source: GrammarVocabulary, texts: ctypes.CDLL | None = None) -> None:
        """`texts`: the compiled native.c, which keeps the tokens of texts; None: each text takes a call into Python."""
        library = llguidance_library()
        assert library is not None
        self.library = library
        self._texts_library = texts
        special = frozenset(source.special_token_ids)
        plain = [b"" if token in special else own for token, own in enumerate(source.tokens)]
        starts = np.cumsum([0, *map(len, plain)], dtype=np.uint32)
        self.token_bytes = TokenBytes(np.frombuffer(b"".join(plain) or b"\0", np.uint8), starts)
        # llguidance marks special tokens by this byte
        tokens = [b"\xff" + own if token in special else own for token, own in enumerate(source.tokens)]
        lengths = np.array([len(own) for own in tokens], np.uint32)

        def tokenize(_: int, text: int, size: int, output: int, room: int) -> int:
            try:
                ids = source(ctypes.string_at(text, size))
            except Exception:  # cannot be raised through the caller; without tokens nothing is forced
                log.exception("a text that a grammar forces cannot be tokenised")
                return 0
            written = np.array(ids[:room], np.uint32)
            ctypes.memmove(output, written.ctypes.data, written.nbytes)
            return len(ids)

        self._tokenize = _TOKENIZE(tokenize)  # called as long as there are matchers
        self._texts = None if texts is None else texts.slip_texts_open(ctypes.cast(self._tokenize, _POINTER))
        call = self._tokenize
        if texts is not None and self._texts is not None:
            call = _TOKENIZE(("slip_texts_tokenize", texts))
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=len(tokens),
            tok_eos=source.eos_token_id,
            token_lens=lengths.ctypes.data,
            token_bytes=b"".join(tokens),
            tokenize_assumes_string=True,
            tokenize_fn=call,
            tokenize_user_data=self._texts,
        )
        message = ctypes.create_string_buffer(500)
        self.pointer = library.llg_new_tokenizer_v2(ctypes.addressof(init), message, len(message))
        if not self.pointer:
            raise RuntimeError(f"llguidance refuses the vocabulary: {message.value.decode(errors='replace')}")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.library.llg_free_tokenizer(self.pointer)
        if self._texts_library is not None and self._texts is not None:
            self._texts_library.slip_texts_close(self._texts)

    def compile(self, grammar: str, nodes: SchemaNodes | None = None) -> NativeMatcher:
        """A matcher in its first state. It may be in an error state. `nodes`: of the schema, if its texts are JSON."""
        init = _MatcherInit()
        self.library.llg_constraint_init_set_defaults(ctypes.addressof(init), self.pointer)
        init.log_buffer_level = init.log_stderr_level = 0
        init.verbose_errors = False
        pointer = self.library.llg_new_matcher(ctypes.addressof(init), b"llguidance", grammar.encode())
        walker = None
        if nodes is not None and self._texts_library is not None:
            walker = Walker.of(nodes, self.token_bytes, self._texts_library)
        return NativeMatcher(self, pointer, walker)


class NativeMatcher:
    __slots__ = ("pointer", "walker", "_vocabulary", "_library")

    def __init__(self, vocabulary: NativeVocabulary, pointer: int, walker: Walker | None = None) -> None:
        self.pointer = pointer
        self.walker = walker  # takes the same tokens
        self._vocabulary = vocabulary
        self._library = vocabulary.library

    def __del__(self) -> None:
        self._library.llg_free_matcher(self.pointer)

    @property
    def pointers(self) -> tuple[int, int]:
        """To the matcher and its walker, for the threads of native.c; 0: none."""
        return self.pointer, 0 if self.walker is None else self.walker.pointer

    def deep_copy(self) -> NativeMatcher:
        """A copy with a lexer of its own."""
        walker = None if self.walker is None else self.walker.copy()
        return NativeMatcher(self._vocabulary, self._library.llg_clone_matcher(self.pointer), walker)

    def reset(self) -> bool:
        """Return to the first state; impossible after an error."""
        if self.walker is not None:
            self.walker.reset()
        return bool(self._library.llg_matcher_reset(self.pointer) == 0)

    def is_error(self) -> bool:
        failed: bool = self._library.llg_matcher_is_error(self.pointer)
        return failed

    def is_stopped(self) -> bool:
        stopped: bool = self._library.llg_matcher_is_stopped(self.pointer)
        return stopped

    def get_error(self) -> str:
        message: bytes | None = self._library.llg_matcher_get_error(self.pointer)
        return "" if message is None else message.decode(errors="replace")

    def consume_token(self, token: int) -> bool:
        if self.walker is not None:
            self.walker.take(token)
        return bool(self._library.llg_matcher_consume_token(self.pointer, token) == 0)

    def compute_ff_tokens(self, room: int = 64) -> list[int]:
        tokens = (ctypes.c_uint32 * room)()
        num: int = self._library.llg_matcher_compute_ff_tokens(self.pointer, ctypes.addressof(tokens), room)
        if num == room and room < _MAX_FORCED:
            return self.compute_ff_tokens(_MAX_FORCED)
        return list(tokens[: max(num, 0)])

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        """Write the mask of the present state; an empty one after an error."""
        if self._library.llg_matcher_compute_mask_into(self.pointer, trg_pointer, trg_byte_size) != 0:
            ctypes.memset(trg_pointer, 0, trg_byte_size)


# GrammarCompiler: makes matchers of the specifications of structured output, by llguidance.
#
# Importing this takes 30 ms, so the first compilation does it.

MAX_SPARES = 64  # matchers of ended sessions that a grammar keeps
_MAX_ERROR_CHARS = 500


class GrammarCompiler:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: of the model."""
        self.vocab_size = vocab_size
        # that can run the matchers
        self.threads: ctypes.CDLL | None = mask_pool.load() if llguidance_library() is not None else None
        # ids of special tokens by their text
        self._special_tokens = {text: token for token in tokenizer.special_ids if (text := tokenizer.piece(token))}
        self._new_matcher = self._matcher_maker(tokenizer)

    def compile(
        self, params: StructuredOutputsParams, checker: LimitedChild, is_wanted: Callable[[], bool]
    ) -> CompiledGrammar:
        """`is_wanted`: whether a request waits for it."""
        try:
            grammar = translate(params, self._special_tokens)
            error = checker.call(grammar.encode(), is_wanted).decode(errors="replace")
            if not error:
                matcher = self._new_matcher(grammar, schema_nodes(params, grammar))
                if not (error := matcher.get_error()):
                    mask = np.zeros(mask_words(self.vocab_size), np.uint32)
                    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)  # the first one is the slowest
                    error = matcher.get_error()  # that no text matches is found by the first mask
                if not error:
                    return CompiledGrammar(matcher, 0 if self.threads is None else MAX_SPARES)
        except BadGrammar as failure:
            error = str(failure)
        except LimitPassed as failure:
            error = f"it is too complex: compiling it takes {failure}"
        error = error.replace("<non-verbose/>", "").strip()
        if error.startswith("NoExtension"):
            error = "no text matches it, as with a rule or $ref that leads only to itself"
        if len(error) > _MAX_ERROR_CHARS:
            error = error[:_MAX_ERROR_CHARS] + " ..."
        raise InvalidParams(f"structured_outputs cannot be used: {error}", param="structured_outputs")

    def _matcher_maker(self, tokenizer: Tokenizer) -> Callable[[str, SchemaNodes | None], Matcher]:
        if self.threads is not None:
            return NativeVocabulary(GrammarVocabulary(tokenizer, self.vocab_size), self.threads).compile
        vocabulary, limits = grammar_vocabulary(tokenizer, self.vocab_size), LLParserLimits(verbose_errors=False)
        return lambda grammar, _: LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


# The vocabulary of a tokenizer as llguidance needs it: the bytes of every token, and the canonical tokens of a text.
#
# The vocabulary has one token more than the model, with the id `vocab_size`: the end of the grammar. So masks do not
# depend on the model's own end tokens; each request maps the end to its stop tokens.

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
