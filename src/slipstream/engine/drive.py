"""Drive: an engine stepped by whoever waits for its results, in their own thread. Nothing runs between calls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from slipstream.engine.front.outputs import OutputProcessor, Track
from slipstream.engine.front.results import RequestOutput
from slipstream.engine.front.served import ServedModel
from slipstream.engine.interrupts import held_back
from slipstream.engine.lanes import Lanes
from slipstream.engine.progress import progress
from slipstream.errors import EngineClosed, QueueFull
from slipstream.messages import Abort, Submit
from slipstream.scheduler.fits import fits_any
from slipstream.scheduler.scheduler import Scheduler

Prepared = tuple[Submit, str | None]
"""A prompt as the core takes it, and its text."""

A_FEW = 8  # prompts taken in with each step, so that many rows that end together find others ready


class Drive:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.outputs = OutputProcessor(None)
        self.closed = False

    def run(
        self,
        served: ServedModel,
        submits: Iterable[Prepared],
        total: int,
        *,
        use_tqdm: bool,
        ahead: int | None = None,
        late: bool = False,
    ) -> list[Track]:
        """Step until all have ended. With `ahead` no more than so many wait in the engine at a time.

        With `late` the first step need not wait until all are taken in: a step asks for whom it has room for, and the
        others come while the device works. The steps are the same, if nobody has a claim to go before the others.
        """
        self.check_open()
        tracks: list[Track] = []
        left: set[str] = set()  # of those, by id
        waiting = iter(submits)
        held = next(waiting, None)
        core = self.lanes.cores[served.facts.name]
        scheduler = core.scheduler
        start = time.monotonic()

        def has_room(num_new: int) -> bool:
            if not late:
                return ahead is None or scheduler.num_waiting < ahead
            if not core.in_flight:
                return not scheduler.num_waiting  # the device waits
            return num_new < A_FEW or core.runs_far_ahead()

        def take() -> bool:
            """Take the next one in; False if there is none, or no room."""
            nonlocal held
            if held is None:
                return False
            try:
                with held_back():  # taken in whole and noted, or not at all
                    track = self._submit(served, held, stream=False)
                    tracks.append(track)
            except QueueFull:
                if not core.has_work():
                    raise
                return False  # room comes as others finish
            if late:
                track.submitted = start  # it has waited since then
            left.add(track.id)
            held = next(waiting, None)
            return True

        try:
            if late:
                assert isinstance(scheduler, Scheduler), "whole prompts are encoded as they are needed"
                scheduler.refill = take
            with progress(total, "prompts", use_tqdm) as advance:
                # what else is under way goes on meanwhile; without it, steps launched too far are seen off here
                while held is not None or left or (core.has_work() and not self.outputs.tracks):
                    num_new = 0
                    while has_room(num_new) and take():
                        num_new += 1
                    for track in self.step():
                        if track.finished and track.id in left:
                            left.discard(track.id)
                            advance(track.num_tokens)
        except BaseException:
            self._give_up(tracks)
            raise
        finally:
            if isinstance(scheduler, Scheduler):
                scheduler.refill = None
        return tracks

    def may_be_late(self, served: ServedModel, submits: Sequence[Prepared]) -> bool:
        """Whether none of these can be refused or goes before others, so that it does not matter who comes when."""
        scheduler = self.lanes.cores[served.facts.name].scheduler
        return (
            isinstance(scheduler, Scheduler)
            and fits_any(scheduler.config, scheduler.cache)
            and not self.outputs.tracks  # somebody else's
            and len({message.priority for message, _ in submits}) == 1
        )

    def stream(self, served: ServedModel, prepared: Prepared) -> Iterator[RequestOutput]:
        """One request's results as they grow. Whoever leaves early aborts it."""
        self.check_open()
        tracks: list[Track] = []
        try:
            with held_back():
                tracks.append(track := self._submit(served, prepared, stream=True))
            shown = 0
            while True:
                # others may step the engine too, so what is new is looked for before each step
                if track.num_tokens > shown or track.finished:
                    shown, finished = track.num_tokens, track.finished
                    yield track.result()
                    if finished:
                        return
                else:
                    self.step()
        finally:
            self._give_up(tracks)

    def step(self) -> list[Track]:
        """One step of the engine. Returns the requests that moved."""
        self.check_open()
        with held_back():  # what a step brought is everybody's, not only its caller's
            moved, aborts = self.outputs.process(self.lanes.step())
            for abort in aborts:
                self.lanes.abort(abort)
        return moved

    def close(self) -> None:
        """Steps and streams from now on are refused; they hold on to nothing."""
        self.closed = True
        self.lanes.cores.clear()
        del self.lanes

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosed("this LLM was closed; make a new one")

    def _submit(self, served: ServedModel, prepared: Prepared, *, stream: bool) -> Track:
        message, text = prepared
        self.lanes.cores[served.facts.name].submit(message)
        return self.outputs.open(message, text, stream=stream, tokenizer=served.tokenizer)

    def _give_up(self, tracks: list[Track]) -> None:
        with held_back():  # whoever interrupts twice means it, but all of them
            for track in tracks:
                if (not track.finished or track.is_query) and not self.closed:
                    self.lanes.abort(Abort(track.id))
                    self.outputs.drop(track.id)
