"""Drive: an engine stepped by whoever waits for its results, in their own thread. Nothing runs between calls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from slipstream.engine.interrupts import held_back, watched
from slipstream.engine.lanes import Lanes
from slipstream.errors import EngineClosed, QueueFull
from slipstream.frontend.inputs import Prepared
from slipstream.frontend.prompt_feeder import PromptFeeder
from slipstream.frontend.request_state import OutputProcessor, RequestState
from slipstream.frontend.results import RequestOutput
from slipstream.frontend.served import ServedModel
from slipstream.messages import Abort
from slipstream.scheduler.admission_checks import admits_any_request
from slipstream.scheduler.scheduler import Scheduler


class SyncLoop:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.outputs = OutputProcessor(None)
        self.closed = False
        self.lock = threading.RLock()
        self._depth = 0  # of turns within turns, of the thread that has the lock
        self._left: deque[RequestState] = deque()  # whose readers are gone; their requests end between steps

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Threads that share an engine take turns. Whatever touches it does so inside of one."""
        with self.lock:
            self.check_open()  # somebody may have closed it meanwhile
            self._depth += 1
            try:
                if self._depth == 1:
                    self._see_off()
                yield
            finally:
                self._depth -= 1

    def run(
        self,
        served: ServedModel,
        submits: Iterable[Prepared],
        advance: Callable[[int], None] = lambda num_tokens: None,
        *,
        late: bool = False,
    ) -> list[RequestState]:
        """In a turn, step until all have ended. `advance` is told of each, with its number of tokens.

        With `late` the first step need not wait until all are taken in: a step asks for whom it has room for, and the
        others come while the device works. The steps are the same, if nobody has a claim to go before the others.
        """
        self.check_open()
        tracks: list[RequestState] = []
        left: set[str] = set()  # of those, by id
        start = time.monotonic()

        core = self.lanes.cores[served.facts.name]
        submit_one, open_track, tokenizer = core.submit_one, self.outputs.open, served.tokenizer

        def submit(prepared: Sequence[Prepared]) -> int:
            """How many of them the core took in; fewer than all where its queue is full."""
            num = 0
            with hold:  # each is taken in whole and noted, or not at all
                for message, text in prepared:
                    try:
                        submit_one(message)
                    except QueueFull:
                        if not core.has_work():
                            raise
                        break  # room comes as others finish
                    track = open_track(message, text, stream=False, tokenizer=tokenizer)
                    if late:
                        track.submitted = start  # it has waited since then
                    tracks.append(track)
                    left.add(track.id)
                    num += 1
            return num

        intake = PromptFeeder(core, submits, submit, late=late)
        try:
            if late:
                core.scheduler.refill = intake.refill
            with watched() as hold:
                # what else is under way goes on meanwhile; without it, steps launched too far are seen off here
                while not intake.ended or left or (core.has_work() and not self.outputs.tracks):
                    intake.take_some()
                    for track in self.step():
                        if track.finished and track.id in left:
                            left.discard(track.id)
                            advance(track.num_tokens)
                    if intake.refused is not None:
                        raise intake.refused
        except BaseException:
            self._left.extend(tracks)
            self._see_off()
            raise
        finally:
            core.scheduler.refill = intake.refused = None  # an error refers to whoever raised it
            core.rest_if_unwanted()
        return tracks

    def may_be_late(self, served: ServedModel, submits: Sequence[Prepared]) -> bool:
        """Whether none of these can be refused or goes before others, so that it does not matter who comes when.

        In the turn in which they run.
        """
        scheduler = self.lanes.cores[served.facts.name].scheduler
        return (
            isinstance(scheduler, Scheduler)
            and admits_any_request(scheduler.config, scheduler.cache)
            and not self.outputs.tracks  # somebody else's
            and len({message.priority for message, _ in submits}) == 1
        )

    def stream(self, served: ServedModel, prepared: Prepared) -> Iterator[RequestOutput]:
        """One request's results as they grow. Whoever leaves early aborts it."""
        tracks: list[RequestState] = []
        reader = threading.get_ident()
        try:
            with self.turn(), held_back():
                tracks.append(track := self._submit(served, prepared, stream=True))
            shown, finished = 0, False
            while not finished:
                reader = threading.get_ident()
                with self.turn():
                    while track.num_tokens == shown and not track.finished:  # others may have stepped the engine
                        self.step()
                    shown, finished, result = track.num_tokens, track.finished, track.result()
                yield result
        finally:
            # the collector may be here, in any thread and in the midst of a step: it waits for nobody
            self._left.extend(tracks)
            if reader == threading.get_ident() and not self._depth:
                self._see_off_if_free()

    def step(self) -> list[RequestState]:
        """In a turn, one step of the engine. Returns the requests that moved."""
        self.check_open()
        self._see_off()
        with held_back():  # what a step brought is everybody's, not only its caller's
            moved, aborts = self.outputs.process(self.lanes.step())
            for abort in aborts:
                self.lanes.abort(abort)
        return moved

    def close(self) -> None:
        """Steps and streams from now on are refused; they hold on to nothing."""
        self.closed = True
        self._left.clear()
        del self.lanes

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosed("this LLM was closed; make a new one")

    def _submit(self, served: ServedModel, prepared: Prepared, *, stream: bool) -> RequestState:
        message, text = prepared
        self.lanes.cores[served.facts.name].submit_one(message)
        return self.outputs.open(message, text, stream=stream, tokenizer=served.tokenizer)

    def _see_off(self) -> None:
        """Ends the requests of those who left."""
        if not self._left:
            return
        with held_back():  # whoever interrupts twice means it, but all of them
            while self._left:
                track = self._left.popleft()
                if (not track.finished or track.is_query) and not self.closed:
                    self.lanes.abort(Abort(track.id))
                    self.outputs.drop(track.id)

    def _see_off_if_free(self) -> None:
        """Who has the engine, or has it next, does it otherwise."""
        with held_back():
            if self.lock.acquire(blocking=False):
                try:
                    if not self.closed:
                        with self.turn():
                            pass
                finally:
                    self.lock.release()
