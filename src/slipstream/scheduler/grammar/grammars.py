"""Grammars: compiles the specifications of structured output in background threads, each content once.

The result of a specification, a grammar or an error, is cached. A new one is first checked in a child process with
limits of time and memory, so that no schema can hold up a thread of the engine.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from slipstream.errors import InvalidParams
from slipstream.scheduler.grammar.checker import GrammarChecker, GrammarTooComplex
from slipstream.scheduler.grammar.compiled import CompiledGrammar
from slipstream.scheduler.grammar.translate import BadGrammar, translate
from slipstream.structured_params import StructuredOutputsParams
from slipstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 256  # specifications
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
        self._vocabulary: tuple[LLTokenizer, frozenset[str]] | None = None
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
        from llguidance import LLMatcher, LLParserLimits

        vocabulary, special_texts = self._open_vocabulary()
        try:
            grammar = translate(params, special_texts)
            error = self._checker().check(grammar)
            if not error:

                def compile() -> LLMatcher:
                    limits = LLParserLimits(verbose_errors=False)
                    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
                    if not matcher.is_error():
                        matcher.compute_bitmask()  # the first one is the slowest; copies share what it has built
                    return matcher

                compiled = CompiledGrammar(compile)
                if not (error := compiled.pick().get_error()):
                    return compiled
        except (BadGrammar, GrammarTooComplex) as failure:
            error = str(failure)
        error = error.replace("<non-verbose/>", "").strip()
        if error.startswith("NoExtension"):
            error = "no text matches it"
        if len(error) > _MAX_ERROR_CHARS:
            error = error[:_MAX_ERROR_CHARS] + " ..."
        raise InvalidParams(f"structured_outputs cannot be used: {error}", param="structured_outputs")

    def _open_vocabulary(self) -> tuple[LLTokenizer, frozenset[str]]:
        from slipstream.text.grammar_vocab import grammar_vocabulary

        with self._lock:
            if self._vocabulary is None:
                tokenizer = self._load_tokenizer()
                if tokenizer is None:
                    raise InvalidParams(
                        "structured_outputs need a tokenizer, and skip_tokenizer_init is set; unset it",
                        param="structured_outputs",
                    )
                texts = frozenset(text for token in tokenizer.special_ids if (text := tokenizer.piece(token)))
                self._vocabulary = grammar_vocabulary(tokenizer, self.vocab_size), texts
            return self._vocabulary

    def _checker(self) -> GrammarChecker:
        checker: GrammarChecker | None = getattr(self._local, "checker", None)
        if checker is None:
            checker = self._local.checker = GrammarChecker()
            self._checkers.append(checker)
        return checker
