"""Drive: an engine stepped by whoever waits for its results, in their own thread. Nothing runs between calls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from slipstream.engine.front.inputs import Prepared
from slipstream.engine.front.outputs import OutputProcessor, Track
from slipstream.engine.front.results import RequestOutput
from slipstream.engine.front.served import ServedModel
from slipstream.engine.interrupts import held_back, watched
from slipstream.engine.lanes import Lanes
from slipstream.engine.progress import progress
from slipstream.errors import EngineClosed, QueueFull, UserError
from slipstream.messages import Abort
from slipstream.scheduler.fits import fits_any
from slipstream.scheduler.scheduler import Scheduler

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
        late: bool = False,
    ) -> list[Track]:
        """Step until all have ended.

        With `late` the first step need not wait until all are taken in: a step asks for whom it has room for, and the
        others come while the device works. The steps are the same, if nobody has a claim to go before the others.
        """
        self.check_open()
        tracks: list[Track] = []
        left: set[str] = set()  # of those, by id
        waiting, held = iter(submits), None  # those who are not taken in yet, and the first of them if it was seen
        is_ready = getattr(submits, "is_ready", lambda: True)  # whether looking at the first means no waiting
        ended = False
        refused: BaseException | None = None
        core = self.lanes.cores[served.facts.name]
        scheduler = core.scheduler
        start = time.monotonic()

        def room(num_new: int) -> int:
            """How many may be taken in before this is asked again; `num_new` were since the last step."""
            if not late:
                return total
            if not is_ready():
                return not core.has_work()  # there is nothing to do but wait
            if not core.in_flight:
                return not scheduler.num_waiting  # the device waits
            if scheduler.num_waiting >= 2 * scheduler.config.max_num_seqs:
                return 0  # the next steps have enough
            return A_FEW - num_new if num_new < A_FEW else core.runs_far_ahead()

        def take(most: int) -> int:
            """Take the next ones in, and say how many there were."""
            nonlocal held, ended, refused
            num = 0
            while num < most and (not num or is_ready()):
                try:
                    held = held or next(waiting, None)
                except BaseException as error:
                    refused = error
                    raise
                if held is None:
                    ended = True
                    break
                try:
                    with hold:  # taken in whole and noted, or not at all
                        tracks.append(track := self._submit(served, held, stream=False))
                except QueueFull:
                    if not core.has_work():
                        raise
                    break  # room comes as others finish
                if late:
                    track.submitted = start  # it has waited since then
                left.add(track.id)
                held = None
                num += 1
            return num

        def take_inside(most: int) -> int:
            """A step asks for more. If that cannot be, it is told when the step is over."""
            nonlocal ended, refused
            core.account.leave(has_work=True)  # to wait for a text is not the core's time
            try:
                return take(most)
            except BaseException as error:
                # whatever kept a prompt from being read has touched nothing of the engine
                if error is not refused and not isinstance(error, UserError):
                    raise
                ended, refused = True, error
                return 0
            finally:
                core.account.enter()

        try:
            if late:
                scheduler.refill = take_inside
            with progress(total, "prompts", use_tqdm) as advance, watched() as hold:
                # what else is under way goes on meanwhile; without it, steps launched too far are seen off here
                while not ended or left or (core.has_work() and not self.outputs.tracks):
                    num_new = 0
                    while (taken := take(room(num_new))) > 0:
                        num_new += taken
                    for track in self.step():
                        if track.finished and track.id in left:
                            left.discard(track.id)
                            advance(track.num_tokens)
                    if refused is not None:
                        raise refused
        except BaseException:
            self._give_up(tracks)
            raise
        finally:
            scheduler.refill = refused = None  # an error refers to whoever raised it
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
