"""InlineClient: the CoreClient of a core that is stepped by the thread that waits for its results.

`call` runs a coroutine of the router: while it waits, the core is stepped. Nothing runs between calls. Threads that
share the core take turns.
"""

from __future__ import annotations

import os
import signal
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, TypeVar

from slipstream.base.errors import EngineClosed, UserError
from slipstream.base.processes import check_process
from slipstream.contracts.messages import PromptSource
from slipstream.engine.lanes import Lanes
from slipstream.transport.client import CoreServer, Listener
from slipstream.transport.frames import Begun, ToCore

S = TypeVar("S")
T = TypeVar("T")
CallingBack = Callable[[Callable[[S], None]], Coroutine[Any, Any, T]]
"""Makes a coroutine that calls the given function."""


@types.coroutine
def next_step() -> Generator[None]:
    """Awaited by a coroutine that `InlineClient.call` runs: returns when the core was stepped."""
    yield


class InlineClient:
    max_result: int | None = None

    def __init__(self, lanes: Lanes, *, sends_begun: bool = False) -> None:
        """`sends_begun`: whether the listener gets `Begun`."""
        self.lanes = lanes
        self.closed = False
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self._server = CoreServer(lanes)
        self._listener: Listener | None = None
        self._sends_begun = sends_begun
        self._depth = 0  # nesting of `turn` in the thread that holds the lock
        self._stepping: int | None = None  # the thread that is inside a step
        self._later: deque[Callable[[], None]] = deque()

    # Messages, inside a turn

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def send(self, message: ToCore) -> None:
        """Executes the message. The listener has the replies when this returns."""
        with interrupts_deferred():
            if replies := self._server.handle(message):
                assert self._listener is not None
                self._listener.receive(replies)

    def feed(self, source: PromptSource, model: str) -> Callable[[], None]:
        """See `Lanes.feed`."""
        return self.lanes.feed(source, model)

    def step(self) -> None:
        """Runs one step of the core. The listener has its outputs when this returns."""
        self.check_open()
        self._call_later_ones()
        assert self._listener is not None
        with interrupts_deferred():  # the outputs of a step belong to all readers: an interrupt must not lose them
            self._stepping = threading.get_ident()
            try:
                outputs = self.lanes.step()
            finally:
                self._stepping = None
            if self._sends_begun and (begun := self.lanes.take_begun()):
                self._listener.receive([Begun(begun)])
            if outputs:
                self._listener.receive([*outputs])

    # Turns

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Locks the core for one thread. All use of the core and of the listener's state is inside a turn."""
        check_process(self.pid)  # before the lock, which a thread of another process may hold forever
        self.check_no_step()
        with self.lock:
            self.check_open()  # another thread may have closed it while this one waited
            self._depth += 1
            try:
                if self._depth > 1:
                    yield
                else:
                    with self.lanes.thread_state():
                        self._call_later_ones()
                        yield
            finally:
                self._depth -= 1

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine that waits for the core only; the core is stepped meanwhile. An error of a
        step is raised inside the coroutine, which ends its requests."""
        with closing(coroutine), self.turn(), watched() as hold:
            try:
                coroutine.send(None)
                while True:
                    try:
                        self.step()
                    except BaseException as error:
                        with hold:  # a second interrupt must not leave some of them running
                            coroutine.throw(error)
                    else:
                        coroutine.send(None)
            except StopIteration as end:
                result: T = end.value
                return result

    def call_back(self, make: CallingBack[S, T], advance: Callable[[S], None]) -> T:
        """As `call`, with a coroutine that calls `advance`."""
        return self.call(make(advance))

    def do(self, function: Callable[[], T]) -> T:
        """Calls a function in a turn, without an interrupt in the middle."""
        with self.turn(), interrupts_deferred():
            return function()

    def later(self, function: Callable[[], None], *, in_reader: bool) -> None:
        """Calls the function in a turn, without waiting for one: garbage collection may call this, in any thread and in
        the middle of a step. `in_reader`: it is called at once if no thread has its turn."""
        self._later.append(function)
        if in_reader and not self._depth:
            with interrupts_deferred():
                if self.lock.acquire(blocking=False):
                    try:
                        if not self.closed:
                            with self.turn():
                                pass
                    finally:
                        self.lock.release()

    def _call_later_ones(self) -> None:
        if self._later:
            with interrupts_deferred():
                while self._later:
                    self._later.popleft()()

    # The end

    def check_open(self) -> None:
        check_process(self.pid)
        if self.closed:
            raise EngineClosed("this LLM was closed; make a new one")

    def check_no_step(self) -> None:
        """Raises for code that a step calls: a logits processor, or the handler of a signal. A step may wait for a
        processor in another thread, which would wait for the lock forever."""
        lanes = getattr(self, "lanes", None)  # another thread may close the core meanwhile
        if self._stepping == threading.get_ident() or (self._stepping and lanes is not None and lanes.is_calling()):
            raise UserError("a logits processor, or code inside a step, cannot call its own LLM; use another one")

    async def close(self) -> None:
        self.shut_down()

    def shut_down(self) -> None:
        """Calls and streams raise from now on. Frees the core, and drops the references to it."""
        if not self.closed:
            self.closed = True
            self._later.clear()
            self._listener = None
            self.lanes.close()
            del self.lanes, self._server


# Handles Ctrl-C between steps: an interrupt inside a step would leave scheduler and runner in disagreement.


class _Hold:
    """An interrupt inside the block is raised at its end; one outside is raised at once.

    Changing a signal handler takes longer than the guarded code. So the handler is installed for a whole call, and
    reads this object.
    """

    depth = 0
    came = False
    is_watched = False  # whether the handler is installed

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.came and not self.depth:
            self.came = False
            raise KeyboardInterrupt

    def interrupt(self, number: int, frame: object) -> None:
        if not self.depth:
            raise KeyboardInterrupt
        self.came = True


_HOLD = _Hold()  # a single one: only the main thread receives interrupts
_interrupt = _HOLD.interrupt
_NO_HOLD = nullcontext()


@contextmanager
def watched() -> Iterator[AbstractContextManager[None]]:
    """Yields a hold, a context manager for code that must not be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield _NO_HOLD
        return
    if _HOLD.is_watched:
        yield _HOLD
        return
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _interrupt):
        yield _NO_HOLD  # the program has a handler of its own
        return
    _HOLD.came = False
    try:
        signal.signal(signal.SIGINT, _interrupt)
        _HOLD.is_watched = True
        yield _HOLD
    finally:
        _HOLD.is_watched = False
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """An interrupt inside the block is raised at its end."""
    with watched() as hold, hold:
        yield
