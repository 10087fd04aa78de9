"""Drive: an engine stepped by whoever waits for its results, in their own thread. Nothing runs between calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slipstream.engine.front.outputs import OutputProcessor, Track
from slipstream.engine.front.results import RequestOutput
from slipstream.engine.front.served import ServedModel
from slipstream.engine.interrupts import held_back
from slipstream.engine.lanes import Lanes
from slipstream.engine.progress import progress
from slipstream.errors import EngineClosed, QueueFull
from slipstream.messages import Abort, Submit

Prepared = tuple[Submit, str | None]
"""A prompt as the core takes it, and its text."""


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
    ) -> list[Track]:
        """Step until all have ended. With `ahead` no more than so many wait in the engine at a time."""
        self.check_open()
        tracks: list[Track] = []
        left: set[str] = set()  # of those, by id
        waiting = iter(submits)
        held = next(waiting, None)
        core = self.lanes.cores[served.facts.name]
        try:
            with progress(total, "prompts", use_tqdm) as advance:
                # what else is under way goes on meanwhile; without it, steps launched too far are seen off here
                while held is not None or left or (core.has_work() and not self.outputs.tracks):
                    while held is not None and (ahead is None or core.scheduler.num_waiting < ahead):
                        try:
                            track = self._submit(served, held, stream=False)
                        except QueueFull:
                            if not core.has_work():
                                raise
                            break  # room comes as others finish
                        tracks.append(track)
                        left.add(track.id)
                        held = next(waiting, None)
                    for track in self.step():
                        if track.finished and track.id in left:
                            left.discard(track.id)
                            advance(track.num_tokens)
        except BaseException:
            self._give_up(tracks)
            raise
        return tracks

    def stream(self, served: ServedModel, prepared: Prepared) -> Iterator[RequestOutput]:
        """One request's results as they grow. Whoever leaves early aborts it."""
        self.check_open()
        track = self._submit(served, prepared, stream=True)
        try:
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
            self._give_up([track])

    def step(self) -> list[Track]:
        """One step of the engine. Returns the requests that moved."""
        self.check_open()
        with held_back():
            outputs = self.lanes.step()
        moved, aborts = self.outputs.process(outputs)
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
        for track in tracks:
            if (not track.finished or track.is_query) and not self.closed:
                self.lanes.abort(Abort(track.id))
                self.outputs.drop(track.id)
