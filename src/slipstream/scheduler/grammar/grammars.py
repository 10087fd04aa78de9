"""Grammars: compiles the specifications of structured output in background threads, each content once.

The result of a specification, a grammar or an error, is cached. A new one is first checked in a child process with
limits of time and memory, so that no schema can hold up a thread of the engine.

Callers take turns (`base/turns.py`). What no request waits for is not compiled.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from slipstream.base.errors import EngineClosed, InvalidParams, QueueFull
from slipstream.base.processes import MAX_CHILD_STACK, LimitedChild
from slipstream.base.turns import CallerTurns
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.check_child import new_checker
from slipstream.scheduler.grammar.session import CompiledGrammar
from slipstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slipstream.scheduler.grammar.native_matcher import GrammarCompiler

T = TypeVar("T")

MAX_CACHED = 256  # grammars
MAX_FAILED = 64  # specifications that are known to be wrong: these never displace a grammar
MAX_QUEUED = 1024  # specifications of one caller that are not compiled yet
NUM_THREADS = 2
_NUM_WITH_SPARES = 8  # grammars, those used last, that keep matchers of ended sessions
_STACK = 2 * MAX_CHILD_STACK  # bytes of these threads: what the check has let pass fits, whatever `ulimit -s` says
_NICE = 5  # of threads that compile, above that of the process: they use what steps and other requests leave


class Compilation(Future[CompiledGrammar]):
    """One specification that is compiled or will be: requests with equal ones share it."""

    def __init__(self, key: bytes, params: StructuredOutputsParams) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # `cancel` has no effect: other requests may wait for it
        self.key = key
        self.params = params
        self.waiting: Counter[str] = Counter()  # requests that wait for it, by caller
        self.checker: LimitedChild | None = None  # while a thread compiles it
        self.user = ""  # of a cached grammar, the caller that used it last

    def is_wanted(self) -> bool:
        return bool(self.waiting)


class Grammars:
    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, max_queued: int = MAX_QUEUED
    ) -> None:
        """`load_tokenizer` is called by the first compilation. `vocab_size`: of the model. `max_queued`: specifications
        of one named caller."""
        self.vocab_size = vocab_size
        self.max_queued = max_queued
        self.finished = threading.Event()  # set by every compilation that ends
        self.threads: ctypes.CDLL | None = None  # that can run the matchers; known after the first compilation
        self._load_tokenizer = load_tokenizer
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None  # compiles
        self._mask_pool: ThreadPoolExecutor | None = None  # for `run`
        self._local = threading.local()  # each thread has a checker
        self._checkers: list[LimitedChild] = []
        self._lock = threading.Lock()  # of all that follows, and of `waiting` and `checker` of compilations
        self._cached: OrderedDict[bytes, Compilation] = OrderedDict()
        self._failed: OrderedDict[bytes, str] = OrderedDict()  # messages
        self._open: dict[bytes, Compilation] = {}  # queued or running
        self._turns: CallerTurns[Compilation] = CallerTurns(
            NUM_THREADS
        )  # a compilation is queued for each caller that waits for it

    def use(self, tokenizer: Tokenizer | None) -> None:
        """Compile with a tokenizer that is loaded already."""
        self._load_tokenizer = lambda: tokenizer

    def compile(self, params: StructuredOutputsParams, caller: str = "") -> Compilation:
        """The grammar, or InvalidParams. A request that does not wait until it is done calls `leave`.

        Raises QueueFull if this caller has too many. The empty name is the program itself, whose calls have no limit.
        """
        key = params.key
        with self._lock:
            if (known := self._cached.get(key)) is not None:
                return self._use(known, caller)
            if (message := self._failed.get(key)) is not None:
                self._failed.move_to_end(key)
                known = Compilation(key, params)
                # a new error each time: each raise adds to the traceback of an exception
                known.set_exception(InvalidParams(message, param="structured_outputs"))
                return known
            compilation = self._open.get(key)
            if compilation is None or compilation.checker is None:
                compilation = self._enqueue(compilation or Compilation(key, params), caller)
            compilation.waiting[caller] += 1
            return compilation

    def leave(self, compilation: Compilation, caller: str = "") -> None:
        """A request does not wait any more: stop what no other request waits for, also while it is checked."""
        with self._lock:
            if compilation.done():
                return
            compilation.waiting[caller] -= 1
            if compilation.waiting[caller]:
                return
            del compilation.waiting[caller]
            if compilation.checker is None:
                self._turns.discard(caller, compilation.key)
            if not compilation.waiting:
                del self._open[compilation.key]
                if compilation.checker is not None:
                    compilation.checker.stop()

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Calls `function`, which computes masks, in a thread: it never waits for a compilation."""
        if self._mask_pool is None:
            self._mask_pool = ThreadPoolExecutor(NUM_THREADS, "slipstream-mask")
        future = self._mask_pool.submit(function)
        future.add_done_callback(lambda _: self.finished.set())
        return future

    def close(self) -> None:
        with self._lock:
            for compilation in self._open.values():
                compilation.waiting.clear()
                compilation.set_exception(EngineClosed("the engine was closed while a grammar was compiled"))
            self._open.clear()
            self._turns.clear()
            for checker in self._checkers:
                checker.stop()
        for pool in (self._pool, self._mask_pool):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        for checker in self._checkers:
            checker.close()

    # With the lock

    def _use(self, known: Compilation, caller: str) -> Compilation:
        """A grammar of the cache is used."""
        known.user = caller
        self._cached.move_to_end(known.key)
        for older in itertools.islice(reversed(self._cached.values()), _NUM_WITH_SPARES, _NUM_WITH_SPARES + 1):
            older.result().drop_spares()
        return known

    def _enqueue(self, compilation: Compilation, caller: str) -> Compilation:
        """Add it to those that the caller waits for."""
        if caller not in compilation.waiting:
            if caller and self._turns.num_queued(caller) >= self.max_queued:
                raise QueueFull(
                    f"{self.max_queued} different structured_outputs of this client wait to be compiled, the limit; "
                    "send more when some of these requests have their first token"
                )
            self._turns.add(caller, compilation.key, compilation)
        if compilation.key not in self._open:
            self._open[compilation.key] = compilation
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, "slipstream-grammar", _lower_priority)
            before = threading.stack_size(_STACK)
            try:
                self._pool.submit(self._compile_next)  # may start a thread
            finally:
                threading.stack_size(before)
        return compilation

    def _take(self, checker: LimitedChild) -> tuple[Compilation, str] | None:
        """The compilation whose turn it is, and the caller whose turn this is."""
        if (taken := self._turns.take()) is None:
            return None
        first, compilation = taken
        compilation.checker = checker
        for caller in compilation.waiting:
            self._turns.discard(caller, compilation.key)
        return compilation, first

    def _end(self, compilation: Compilation, caller: str, result: CompiledGrammar | BaseException) -> None:
        compilation.checker = None
        self._turns.end(caller)
        if compilation.done():
            return
        if self._open.get(compilation.key) is compilation:
            del self._open[compilation.key]
        if isinstance(result, CompiledGrammar):
            compilation.set_result(result)
            self._cached[compilation.key] = compilation
            self._use(compilation, caller)
            if len(self._cached) > MAX_CACHED:
                self._drop_one()
        else:
            compilation.set_exception(result)
            if isinstance(result, InvalidParams) and compilation.waiting:  # else its check may have been stopped
                self._failed[compilation.key] = str(result)
                if len(self._failed) > MAX_FAILED:
                    self._failed.popitem(last=False)

    def _drop_one(self) -> None:
        """Drop the least recently used grammar of the caller that has most: no caller displaces those of others."""
        users = Counter(each.user for each in self._cached.values())
        most = max(users.values())
        del self._cached[next(key for key, each in self._cached.items() if users[each.user] == most)]

    # In the threads

    def _compile_next(self) -> None:
        """Compiles what has its turn now, if anything is left."""
        checker: LimitedChild | None = getattr(self._local, "checker", None)
        if checker is None:
            checker = self._local.checker = new_checker()
            self._checkers.append(checker)
        with self._lock:
            taken = self._take(checker)
        if taken is None:
            return
        compilation, caller = taken
        result: CompiledGrammar | BaseException
        try:
            result = self._open_compiler().compile(compilation.params, checker, compilation.is_wanted)
        except BaseException as error:
            result = error
        with self._lock:
            self._end(compilation, caller, result)
        self.finished.set()

    def _open_compiler(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                # imported here, in a thread: an engine without structured output does not need it
                from slipstream.scheduler.grammar.native_matcher import GrammarCompiler

                tokenizer = self._load_tokenizer()
                if tokenizer is None:
                    raise InvalidParams(
                        "structured_outputs need a tokenizer, and `skip_tokenizer_init=True` is set; unset it",
                        param="structured_outputs",
                    )
                self._compiler = GrammarCompiler(tokenizer, self.vocab_size)
                self.threads = self._compiler.threads
            return self._compiler


def _lower_priority() -> None:
    """Of this thread, and of the child process that it starts."""
    with suppress(OSError):  # a sandbox may forbid it
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + _NICE, 19))
