"""Grammars: compiles the specifications of structured output in background threads, each content once.

The result of a specification, a grammar or an error, is cached. A new one is first checked in a child process with
limits of time and memory, so that no schema can hold up a thread of the engine.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from slipstream.config.buffer_size import mask_words
from slipstream.errors import InvalidParams
from slipstream.scheduler.grammar import pool_library
from slipstream.scheduler.grammar.checker import GrammarChecker, GrammarTooComplex
from slipstream.scheduler.grammar.compiled import CompiledGrammar, Matcher
from slipstream.scheduler.grammar.lark_nodes import BadGrammar
from slipstream.scheduler.grammar.native_matcher import NativeVocabulary, llguidance_library
from slipstream.scheduler.grammar.schema_nodes import SchemaNodes, schema_nodes
from slipstream.scheduler.grammar.translate import translate
from slipstream.structured_params import StructuredOutputsParams
from slipstream.text.tokenizer import Tokenizer

MAX_CACHED = 256  # specifications
MAX_SPARES = 64  # matchers of ended sessions that a grammar keeps
_NUM_WITH_SPARES = 8  # grammars, those used last, that keep such matchers
NUM_THREADS = 2
_MAX_ERROR_CHARS = 500


class Grammars:
    def __init__(self, load_tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        """`load_tokenizer` is called by the first compilation. `vocab_size`: of the model."""
        self.vocab_size = vocab_size
        self.finished = threading.Event()  # set by every compilation that ends
        self._load_tokenizer = load_tokenizer
        self._cached: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._local = threading.local()  # each thread has a checker
        self._checkers: list[GrammarChecker] = []
        self._vocabulary: tuple[Callable[[str, SchemaNodes | None], Matcher], Mapping[str, int]] | None = None
        self.threads: ctypes.CDLL | None = None  # that can run the matchers; known after the first compilation
        self._lock = threading.Lock()

    def use(self, tokenizer: Tokenizer | None) -> None:
        """Compile with a tokenizer that is loaded already."""
        self._load_tokenizer = lambda: tokenizer

    def compile(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """The grammar, or InvalidParams. Equal parameters share one future."""
        key = params.key
        future = self._cached.get(key)
        if future is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, "slipstream-grammar")
            future = self._cached[key] = self._pool.submit(self._compile, params)
            future.add_done_callback(lambda _: self.finished.set())
            while len(self._cached) > MAX_CACHED and next(iter(self._cached.values())).done():
                self._cached.popitem(last=False)
        self._cached.move_to_end(key)
        for older in itertools.islice(reversed(self._cached.values()), _NUM_WITH_SPARES, _NUM_WITH_SPARES + 1):
            if older.done() and not older.cancelled() and older.exception() is None:
                older.result().drop_spares()
        return future

    def run(self, function: Callable[[], None]) -> Future[None]:
        """Calls `function` in one of the threads."""
        assert self._pool is not None, "there are grammars, so there are threads"
        future = self._pool.submit(function)
        future.add_done_callback(lambda _: self.finished.set())
        return future

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for checker in self._checkers:
            checker.close()

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        new_matcher, special_tokens = self._open_vocabulary()
        try:
            grammar = translate(params, special_tokens)
            error = self._checker().check(grammar)
            if not error:
                matcher = new_matcher(grammar, schema_nodes(params, grammar))
                if not (error := matcher.get_error()):
                    mask = np.zeros(mask_words(self.vocab_size), np.uint32)
                    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)  # the first one is the slowest
                    return CompiledGrammar(matcher, 0 if self.threads is None else MAX_SPARES)
        except (BadGrammar, GrammarTooComplex) as failure:
            error = str(failure)
        error = error.replace("<non-verbose/>", "").strip()
        if error.startswith("NoExtension"):
            error = "no text matches it"
        if len(error) > _MAX_ERROR_CHARS:
            error = error[:_MAX_ERROR_CHARS] + " ..."
        raise InvalidParams(f"structured_outputs cannot be used: {error}", param="structured_outputs")

    def _open_vocabulary(self) -> tuple[Callable[[str, SchemaNodes | None], Matcher], Mapping[str, int]]:
        """A function that makes a matcher of a grammar, and the ids of special tokens by their text."""
        with self._lock:
            if self._vocabulary is None:
                tokenizer = self._load_tokenizer()
                if tokenizer is None:
                    raise InvalidParams(
                        "structured_outputs need a tokenizer, and `skip_tokenizer_init=True` is set; unset it",
                        param="structured_outputs",
                    )
                texts = {text: token for token in tokenizer.special_ids if (text := tokenizer.piece(token))}
                self._vocabulary = self._make_compiler(tokenizer), texts
            return self._vocabulary

    def _make_compiler(self, tokenizer: Tokenizer) -> Callable[[str, SchemaNodes | None], Matcher]:
        from llguidance import LLMatcher, LLParserLimits

        from slipstream.text.grammar_vocab import GrammarVocabulary, grammar_vocabulary

        threads = pool_library.load() if llguidance_library() is not None else None
        if threads is not None:
            native = NativeVocabulary(GrammarVocabulary(tokenizer, self.vocab_size), threads)
            self.threads = threads
            return native.compile
        vocabulary, limits = grammar_vocabulary(tokenizer, self.vocab_size), LLParserLimits(verbose_errors=False)
        return lambda grammar, _: LLMatcher(vocabulary, grammar, log_level=0, limits=limits)

    def _checker(self) -> GrammarChecker:
        checker: GrammarChecker | None = getattr(self._local, "checker", None)
        if checker is None:
            checker = self._local.checker = GrammarChecker()
            self._checkers.append(checker)
        return checker
