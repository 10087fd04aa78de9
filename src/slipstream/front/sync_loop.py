"""SyncLoop: steps the engine in the thread of the call that waits for results. Nothing runs between calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

from slipstream.base.errors import EngineClosed, InvalidParams, QueueFull, UserError
from slipstream.contracts.messages import Abort, Output
from slipstream.engine.core import EngineCore
from slipstream.engine.lanes import Lanes
from slipstream.front.core_state import check_process
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.request_state import OutputProcessor, RequestState
from slipstream.front.results import RequestOutput
from slipstream.front.served import ServedModel
from slipstream.metrics.stats import ModelStats
from slipstream.scheduler.query_registry import admits_any_request
from slipstream.scheduler.scheduler import Scheduler

SleepMode = Literal["abort", "wait", "keep"]


class SyncLoop:
    as_lists = False  # prompts stay in this process

    def __init__(self, lanes: Lanes, *, with_stats: bool = False) -> None:
        self.lanes = lanes
        self.stats: dict[str, ModelStats] | None = None  # by model; None: requests are not counted
        if with_stats:
            self.stats = {name: ModelStats() for name in lanes.cores}
        self.outputs = OutputProcessor()
        self.closed = False
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self._depth = 0  # nesting of `turn` in the thread that holds the lock
        self._stepping: int | None = None  # the thread that is inside a step of the engine
        self._abandoned: deque[RequestState] = deque()  # requests without a reader, aborted between steps

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Locks the engine for one thread. All use of the engine is inside a turn."""
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
                        self._abort_abandoned()
                        yield
            finally:
                self._depth -= 1

    def run(
        self,
        served: ServedModel,
        submits: Iterable[PreparedPrompt],
        advance: Callable[[Any], None] = lambda state: None,
        *,
        follows: bool = False,
    ) -> list[Any]:
        """Steps until all prompts are finished, inside a turn. Returns their states in the order of the prompts.

        `advance` is called with the state of each request that has finished. With `follows` the first step does not
        wait until all prompts are submitted: a step takes the prompts it has room for, and the others are submitted
        while the device computes. The steps are the same, provided that all prompts have one priority.
        """
        self.check_open()
        self.lanes.sleeper.check_awake(served.base_name)
        states: list[RequestState] = []
        unfinished: set[str] = set()  # request ids
        start = time.monotonic()

        core = self.lanes.cores[served.base_name]
        submit_one, open_state = core.submit_one, self.outputs.open

        def submit(prepared: Sequence[PreparedPrompt]) -> int:
            """Returns how many the core accepted: fewer than all where its queue is full."""
            num = 0
            with hold:  # no interrupt between the submission of a request and the creation of its state
                for message, text in prepared:
                    try:
                        submit_one(message)
                    except QueueFull:
                        if not core.has_requests():
                            raise
                        break  # the queue empties as requests finish
                    state = open_state(message, text, streaming=False, model=served)
                    if self.stats is not None:
                        state.count_begin(self.stats[served.base_name])
                    if follows:
                        state.submitted = start  # the request has waited since the call began
                    states.append(state)
                    unfinished.add(state.id)
                    num += 1
            return num

        feeder = PromptFeeder(core, submits, submit, follows=follows)
        try:
            if follows:
                core.scheduler.refill = feeder.refill
            with watched() as hold:
                # requests of other readers continue meanwhile; without those, the steps in flight are completed here
                while not feeder.ended or unfinished or (core.has_requests() and not self.outputs.states):
                    feeder.take_some()
                    for state in self.step():
                        if state.finished and state.id in unfinished:
                            unfinished.discard(state.id)
                            if state.refused is not None:
                                raise state.refused
                            advance(state)
                    if feeder.error is not None:
                        raise feeder.error
        except BaseException:
            self._abandoned.extend(states)
            self._abort_abandoned()
            raise
        finally:
            core.scheduler.refill = feeder.error = None  # breaks the reference cycle of an exception and its frames
            core.mark_idle_if_no_request()
        return states

    def may_follow(self, served: ServedModel, submits: Sequence[PreparedPrompt]) -> bool:
        """Whether `run` may use `follows` for these generation prompts, inside the same turn: the scheduler cannot
        refuse any of them, and all have one priority."""
        scheduler = self.lanes.cores[served.base_name].scheduler
        return (
            isinstance(scheduler, Scheduler)
            and admits_any_request(scheduler.config, scheduler.cache)
            and not self.outputs.states  # of other readers
            and len({message.priority for message, _ in submits}) == 1
        )

    def stream(self, served: ServedModel, prepared: PreparedPrompt) -> Iterator[RequestOutput]:
        """Yields the results of one request as they grow. Closing the iterator aborts the request."""
        states: list[RequestState] = []
        reader = threading.get_ident()
        try:
            with self.turn(), interrupts_deferred():
                states.append(state := self.submit(served, prepared, streaming=True))
            shown, finished = 0, False
            while not finished:
                reader = threading.get_ident()
                with self.turn():
                    while state.num_tokens == shown and not state.finished:  # other threads step the engine too
                        self.step()
                    if state.refused is not None:
                        raise state.refused
                    shown, finished, result = state.num_tokens, state.finished, state.next_result()
                if result is not None:
                    yield result
        finally:
            # may run in the garbage collector, in any thread and inside a step, so it must not wait for the lock
            self._abandoned.extend(states)
            if reader == threading.get_ident() and not self._depth:
                self._abort_abandoned_if_unlocked()

    def submit(self, served: ServedModel, prepared: PreparedPrompt, *, streaming: bool) -> RequestState:
        """Submits one request, inside a turn, and returns its state."""
        self.lanes.sleeper.check_awake(served.base_name)
        message, text = prepared
        self.lanes.cores[served.base_name].submit_one(message)
        state: RequestState = self.outputs.open(message, text, streaming=streaming, model=served)
        if self.stats is not None:
            state.count_begin(self.stats[served.base_name])
        return state

    def step(self) -> list[RequestState]:
        """Runs one step of the engine, inside a turn. Returns the states with new output."""
        self.check_open()
        self._abort_abandoned()
        with interrupts_deferred():  # the outputs of a step belong to all readers: an interrupt must not lose them
            self._stepping = threading.get_ident()
            try:
                outputs = self.lanes.step()
            finally:
                self._stepping = None
            return self._process(outputs)

    def _process(self, outputs: list[Output]) -> list[RequestState]:
        if self.stats is not None:
            self.outputs.begin(self.lanes.take_begun())
        updated, aborts = self.outputs.process(outputs)
        if self.stats is not None:
            for state in updated:
                if state.finished:
                    state.count_end()
        for abort in aborts:
            self.lanes.abort(abort)
        return updated

    def sleep(self, level: int, mode: SleepMode) -> None:
        """`mode`: requests of streams and of `StepEngine` are aborted, or awaited, or kept and computed again later."""
        if mode not in get_args(SleepMode):
            raise InvalidParams(f"mode is {mode!r:.50}; give abort, wait or keep", param="mode")
        with self.turn(), interrupts_deferred():
            if mode == "wait":
                while self.lanes.has_requests():
                    self.step()
            if mode == "abort":
                for state in list(self.outputs.states.values()):
                    self.lanes.abort(Abort(state.id))
                    self.outputs.drop(state.id)
                    state.abort()
            self._process(self.lanes.sleeper.sleep(level))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        with self.turn():
            self.lanes.sleeper.wake_up(tags)

    def update_weights(self, source: Any, model: str | None) -> None:
        with self.turn(), interrupts_deferred():
            self._process(self.lanes.sleeper.update_weights(source, model))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> None:
        with self.turn(), interrupts_deferred():
            if reset_running_requests:
                self._process(self.lanes.sleeper.preempt_all())
            else:
                self.lanes.reset_prefix_cache()

    def close(self) -> None:
        """Steps and streams raise from now on. Drops the references to the engine."""
        self.closed = True
        self._abandoned.clear()
        del self.lanes

    def check_open(self) -> None:
        check_process(self.pid)
        if self.closed:
            raise EngineClosed("this LLM was closed; make a new one")

    def check_no_step(self) -> None:
        """Raises for code that a step calls: a logits processor, or the handler of a signal. A step may wait for a
        processor in another thread, which would wait for the lock forever."""
        lanes = getattr(self, "lanes", None)  # another thread may close the engine meanwhile
        if self._stepping == threading.get_ident() or (self._stepping and lanes is not None and lanes.is_calling()):
            raise UserError("a logits processor, or code inside a step, cannot call its own LLM; use another one")

    def _abort_abandoned(self) -> None:
        """Aborts the requests whose readers are gone."""
        if not self._abandoned:
            return
        with interrupts_deferred():  # a second interrupt must not leave some of them running
            while self._abandoned:
                state = self._abandoned.popleft()
                if (not state.finished or state.is_query) and not self.closed:
                    self.lanes.abort(Abort(state.id))
                    self.outputs.drop(state.id)

    def _abort_abandoned_if_unlocked(self) -> None:
        """Aborts them now if the lock is free; else the next turn or step does."""
        with interrupts_deferred():
            if self.lock.acquire(blocking=False):
                try:
                    if not self.closed:
                        with self.turn():
                            pass
                finally:
                    self.lock.release()


# PromptFeeder: submits the prompts of one call to the core, and decides when each is submitted.

PROMPTS_PER_STEP = 8  # prompts submitted with each step, so that rows that finish together can be filled at once


class PromptFeeder:
    """Between steps the call submits prompts by `take_some`. With `follows` the scheduler can call `refill`."""

    def __init__(
        self,
        core: EngineCore,
        submits: Iterable[PreparedPrompt],
        submit: Callable[[Sequence[PreparedPrompt]], int],
        *,
        follows: bool,
    ) -> None:
        """`submit` submits prompts in order and returns how many: fewer than all where the core's queue is full."""
        self.ended = False  # no prompts are left
        self.error: BaseException | None = None  # the error that ended them, which the call raises between steps
        self._core = core
        self._submit = submit
        self._follows = follows
        self._source = iter(submits)
        self._unsubmitted: list[PreparedPrompt] = []  # taken from the source and not yet submitted
        self._is_ready = getattr(submits, "is_ready", lambda: True)  # whether `next(source)` does not wait

    def take_some(self) -> None:
        """Submits the prompts that the next step should have; all of them, without `follows`."""
        num_new = 0
        while taken := self._take(self._room(num_new)):
            num_new += taken

    def refill(self, limit: int) -> int:
        """Called by the scheduler in a step: submits up to `limit` prompts and returns how many.

        An error of a prompt must not end the step: it is stored in `error`, which the call raises after the step.
        """
        self._core.timer.leave(has_requests=True)  # the time to tokenise a text does not count as the core's
        try:
            return self._take(limit)
        except BaseException as error:
            # errors of the prompts themselves have not changed the state of the engine
            if error is not self.error and not isinstance(error, UserError):
                raise
            self.ended, self.error = True, error
            return 0
        finally:
            self._core.timer.enter()

    def _room(self, num_new: int) -> int:
        """How many prompts to submit now; `num_new` were submitted since the last step."""
        core, scheduler = self._core, self._core.scheduler
        if not self._follows:
            return scheduler.config.max_waiting
        if not self._is_ready():
            return not core.has_requests()  # wait for the tokenizer only where there is nothing to compute
        if not core.has_launched:
            return not scheduler.num_waiting  # the device is idle: one prompt, then a step
        if scheduler.num_waiting >= 2 * scheduler.config.max_num_seqs:
            return 0  # enough for the next steps
        return PROMPTS_PER_STEP - num_new if num_new < PROMPTS_PER_STEP else core.runs_far_ahead()

    def _take(self, limit: int) -> int:
        """Submits up to `limit` prompts, as far as they are ready, and returns how many."""
        ready, source, is_ready = self._unsubmitted, self._source, self._is_ready
        while len(ready) < limit and (not ready or is_ready()):
            try:
                ready.append(next(source))
            except StopIteration:
                num = self._submit_ready(limit)
                self.ended = not ready
                return num
            except BaseException as error:
                self.error = error
                self._submit_ready(limit)  # those before it
                raise
        return self._submit_ready(limit)

    def _submit_ready(self, limit: int) -> int:
        if not self._unsubmitted:
            return 0
        num = self._submit(self._unsubmitted[:limit])
        del self._unsubmitted[:num]
        return num


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
