"""Grammars: compiles the specifications of structured output in background threads, each content once.

The result of a specification, a grammar or an error, is cached. A new one is first checked in a child process with
limits of time and memory, so that no schema can hold up a thread of the engine.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from slipstream.errors import InvalidParams
from slipstream.scheduler.grammar.checker import GrammarChecker
from slipstream.scheduler.grammar.compiled import CompiledGrammar
from slipstream.structured_params import StructuredOutputsParams
from slipstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slipstream.scheduler.grammar.grammar_compiler import GrammarCompiler

MAX_CACHED = 256  # specifications
_NUM_WITH_SPARES = 8  # grammars, those used last, that keep matchers of ended sessions
NUM_THREADS = 2


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
        self._compiler: GrammarCompiler | None = None
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
        return self._open_compiler().compile(params, self._checker())

    def _open_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                # imported here, in a thread: an engine without structured output does not need it
                from slipstream.scheduler.grammar.grammar_compiler import GrammarCompiler

                tokenizer = self._load_tokenizer()
                if tokenizer is None:
                    raise InvalidParams(
                        "structured_outputs need a tokenizer, and `skip_tokenizer_init=True` is set; unset it",
                        param="structured_outputs",
                    )
                self._compiler = GrammarCompiler(tokenizer, self.vocab_size)
                self.threads = self._compiler.threads
            return self._compiler

    def _checker(self) -> GrammarChecker:
        checker: GrammarChecker | None = getattr(self._local, "checker", None)
        if checker is None:
            checker = self._local.checker = GrammarChecker()
            self._checkers.append(checker)
        return checker
