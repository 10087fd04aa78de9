"""Constraints: the requests whose draws the host takes part in, by a grammar or by logits processors (`processors`).

The plan of a step is launched before the tokens of the step before it are known. The masks come later: between the
launch of the step's forward and its head the core commits all older steps, which advances the sessions, and then asks
for the masks (`late`), while the device computes the forward. When the tokens of a step arrive, threads advance the
sessions and fill the masks (`begin`, `mask_pool.py`), while the scheduler commits the step, its outputs are delivered
and the next step is planned; where they cannot, `advance` and `late` do the same one by one. The result of a step has
the drafts of the row's next step, so a row with drafts has a mask for each of its draws (DraftRow), which
threads fill too (DraftFiller).

A mask that is not filled when the forward should have ended delays no other row: its row sits out the step (`SitOut` in
step.py), and computes the same position again in a later one. A session whose masks often take longer than the forward
is slow: its request is planned only when its last token is known and a background thread has filled its mask.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config.buffer_size import mask_words, num_kept_masks
from slipstream.contracts.request import Request, Status, WaitFor
from slipstream.contracts.step import DrawEdits, Ints, SitOut, StepMasks, StepResult
from slipstream.scheduler.grammar.draws import DraftFiller, DrawGroup, Drawing, LateDraws, MaskArray
from slipstream.scheduler.grammar.grammars import Compilation, Grammars
from slipstream.scheduler.grammar.mask_pool import MaskBatch, MaskPool
from slipstream.scheduler.grammar.session import CompiledGrammar, Session
from slipstream.scheduler.host_processors import HostProcessors
from slipstream.scheduler.outputs import Launched

if TYPE_CHECKING:
    from slipstream.params.processors import LogitsProcessor


MIN_BUDGET = 0.001  # seconds for the masks of a step, however short the step is
_WAIT = 0.005  # seconds; then the caller runs: other requests may have arrived


class Constraints:
    def __init__(
        self,
        grammars: Grammars,
        max_rows: int,
        engine: Sequence[LogitsProcessor] = (),
        open_masks: Callable[[int], StepMasks] | None = None,
    ) -> None:
        """`engine`: the logits processors of all requests. `open_masks`: gives memory for so many masks, which the
        device reads without a copy in between."""
        self.grammars = grammars
        self.processors = HostProcessors(grammars.vocab_size, engine, grammars.finished)
        self.num_live = 0  # requests with a grammar or processors that have not ended
        self.min_budget = MIN_BUDGET
        self.budget = MIN_BUDGET  # seconds that the masks of the next step may take
        self._deadline: float | None = None  # when the forward of the newest launched plan should have ended
        # of the newest plan: requests with a grammar that draw, their rows, and how many tokens they draw
        self.drawing: list[tuple[Request, int, int]] = []
        self._compiling = WaitingGrammars(grammars)
        self._held = HeldRequests(grammars)
        self._end = grammars.vocab_size
        self._words = mask_words(grammars.vocab_size)
        self._max_rows = max_rows
        self._open_masks = open_masks or MaskArray(max_rows, self._words)
        # of the step whose head is launched next: `drawing`, and whether logits processors take part
        self._awaited: list[tuple[Request, int, int]] = []
        self._has_edits = False
        self.sitting: list[Request] = []  # requests that sit out the step of the last `late`
        self._indexed: list[Session] = []  # sessions with an index of a mask in the newest plan
        self._group: DrawGroup | None = None  # of the newest plan, if it has the rows of the plan before it
        self._begun: DrawGroup | None = None  # whose masks for the newest plan `begin` has begun
        self._planned: tuple[list[Request], list[int]] = [], []  # of the newest plan: requests that draw, admissions
        self._masks: StepMasks | None = None  # of the newest launched plan, if they are open
        self._keeps = False  # masks of this plan that the device keeps are not written
        self._pool: MaskPool | None = None
        self._draft_filler = DraftFiller(self._end, grammars.finished)
        self._ended: list[Session] = []  # of requests that have ended, not closed yet

    @property
    def is_drawing(self) -> bool:
        """Whether `late` is needed for the newest plan."""
        return bool(self.drawing or self.processors.drawing)

    @property
    def is_filling(self) -> bool:
        """Whether threads fill masks of the newest plan since `begin`, which nothing has waited for yet."""
        return self._masks is not None and self._pool is not None and self._pool.is_running

    @property
    def is_filled(self) -> bool:
        """Whether `advance` would not wait for threads."""
        return self._pool is None or self._pool.is_done()

    @property
    def is_waiting(self) -> bool:
        """Whether background threads work for a request."""
        return bool(self._compiling or self._held or self.processors.held)

    def wait(self) -> None:
        """Wait until a background thread has finished something, for a few milliseconds at most."""
        if self.grammars.finished.wait(_WAIT):
            self.grammars.finished.clear()

    # Submitting

    def enter(self, requests: Sequence[Request]) -> WaitFor:
        """Take a new request: give its samples their processors, and start to compile its grammar. Returns what it
        must wait for; raises if a processor refuses it or its grammar is known to be wrong."""
        self.processors.open(requests)
        waits_for = WaitFor.NOTHING
        if requests[0].params.structured_outputs is not None:
            grammar = self._compiling.compile(requests)
            if grammar is None:
                waits_for = WaitFor.GRAMMAR
            else:
                self._open_sessions(requests, grammar)
        self.num_live += sum(request.is_constrained for request in requests)
        return waits_for

    def take_compiled(self) -> Iterator[tuple[list[Request], Exception | None]]:
        """Samples whose grammar is compiled, and have a session now, or is wrong."""
        for requests, found in self._compiling.take():
            if isinstance(found, Exception):
                yield requests, found
            else:
                self._open_sessions(requests, found)
                yield requests, None

    def _open_sessions(self, requests: Sequence[Request], grammar: CompiledGrammar) -> None:
        """Give each sample a session of its own."""
        self._close_ended()
        for request in requests:
            stop_ids = [token for token in request.stop_ids if token < self._end]
            request.session = Session(grammar, request.tokens, request.num_prompt, stop_ids, self._end)
        if self._pool is None and self.grammars.threads is not None:
            num_kept = num_kept_masks(self._end)
            self._pool = MaskPool(self.grammars.threads, self._words, self._end, self._max_rows, max_masks=num_kept)

    def leave(self, request: Request) -> None:
        """The request has ended. Threads may still use its session."""
        self.num_live -= 1
        if request.session is not None:
            self._ended.append(request.session)
        elif request.params.structured_outputs is not None:
            self._compiling.leave(request)

    def _close_ended(self) -> None:
        if self._pool is not None and self._pool.is_running:
            return
        for session in self._ended:
            if session.job is None or session.job.done():
                session.close()
        self._ended.clear()

    # Sessions

    def plan(self, sampling: list[Request], drawn: Sequence[int] | None = None, num_proposed: int = 0) -> None:
        """Records that these requests draw in the plan under construction. `drawn`: how many tokens; None: one each.
        `num_proposed`: drafts that the plan proposes for the next plan."""
        self.processors.plan(sampling)
        group = None
        if drawn is None and not num_proposed and self._pool is not None:
            same = sampling, [request.admission for request in sampling]
            if self._group is not None and self._group.is_of(*same):
                self.drawing = self._group.drawing
                self._group.hold_slow()
                return
            if same == self._planned:
                group = DrawGroup(*same)
            self._planned = same
        self._group = group
        self.drawing = [] if group is None else group.drawing
        for before in self._indexed:
            before.mask_index = -1
        self._indexed = []
        index = 0
        for request, num in zip(sampling, itertools.repeat(1) if drawn is None else drawn, strict=False):
            session = request.session
            if session is not None:
                if group is None:
                    self.drawing.append((request, request.row, num))
                session.num_proposed = num_proposed
                if num == 1:
                    session.mask_index = index
                    self._indexed.append(session)
                index += num
                if session.is_slow:
                    request.hold()

    def launch(self, expected: float) -> bool:
        """The forward of the newest plan is launched, takes about `expected` seconds, and all older steps are
        committed. Returns whether its head should wait: threads fill the masks."""
        self.budget = max(self.min_budget, expected)
        self._deadline = time.perf_counter() + self.budget
        self._awaited, self.drawing = self.drawing, []
        self._has_edits = bool(self.processors.drawing)
        return self.is_filling and not self._has_edits

    def wake(self) -> list[Request]:
        """Let requests run whose processors have run. Returns those whose masks are filled now: `settle` comes next."""
        self.processors.wake()
        return self._held.wake()

    def begin(self, launched: Launched, result: StepResult) -> None:
        """The tokens of a step are known and will be committed now: threads begin to advance the sessions, and to fill
        their masks for the newest plan. Rows with drafts, and tokens that end a request, are left to `advance`."""
        if self._pool is None or launched.drawn is not None:
            return
        has_masks, group = bool(self.drawing), self._group
        if has_masks and group is not None and self.drawing is group.drawing and group.take(launched, result):
            self._begun = group
            masks = self._open(self.drawing, bool(self.processors.drawing))
            self._pool.start(group, masks, keeps=self._keeps)
            return
        batch = MaskBatch()
        for request, admission, token, has_failed in zip(
            launched.requests, launched.admissions, result.tokens.tolist(), result.failed.tolist(), strict=True
        ):
            session = request.session
            if session is None or session.job is not None or has_failed or request.admission != admission:
                continue
            if token in request.stop_ids or session.num_taken != len(session.tokens):
                continue
            # the mask depends on all tokens before it: none but this one and the draw of the newest plan is pending
            index = session.mask_index if has_masks and request.pending == 2 else -1
            session.has_mask = index >= 0
            batch.add(session, token, index)
        if batch.sessions:
            own = self._open(self.drawing, bool(self.processors.drawing)) if has_masks else None
            self._pool.start(batch, own, keeps=self._keeps)

    def _open(self, drawing: Drawing, has_edits: bool) -> StepMasks:
        """The masks of the plan whose forward was launched last."""
        if self._masks is None:
            num = sum(num for _, _, num in drawing)
            self._masks = self._open_masks(num)
            # processors change masks, and those along drafts are recorded
            self._keeps = self._masks.entries is not None and num == len(drawing) and not has_edits
        return self._masks

    def advance(self, requests: Sequence[Request]) -> list[Request]:
        """Sessions take the tokens that their requests have got since. Returns the requests whose grammar is complete
        or forces the next tokens."""
        if self._pool is not None:
            bits = None if self._masks is None else self._masks.bits.view(np.uint32)
            self._pool.wait(bits, self.budget, None if bits is None else self._time_left())
        return self.settle(requests)

    def settle(self, requests: Sequence[Request]) -> list[Request]:
        """As `advance`, for sessions that no thread uses, or that have a late mask."""
        changed = []
        for request in requests:
            session = request.session
            assert session is not None
            if session.job is not None:
                if session.is_busy:
                    self._held.wait_for_late(request)
                    continue
                session.job.result()
            if session.num_taken != len(request.tokens):
                session.catch_up()
            if session.forced or session.is_complete:
                changed.append(request)
            if request.held and not request.pending:
                if session.is_slow and not session.forced and session.ready is None:
                    self._held.fill(request, session, self.budget)
                else:
                    request.release_hold()
        return changed

    def _time_left(self) -> float | None:
        """Seconds to wait for masks of the step whose forward was launched last; None: no limit."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.perf_counter())

    # Masks

    def late(self) -> DrawEdits:
        """Masks and edits of the rows of the step of the last `launch`, whose sessions have taken all tokens. The next
        call reuses the masks."""
        drawing, self._awaited = self._awaited, []
        masks, self._masks = self._open(drawing, self._has_edits), None
        group, self._begun = self._begun, None
        self.sitting = []
        if group is not None:
            if group.drawing is drawing and not self._has_edits and group.is_filled():
                return self._late(masks, group.rows, group.sessions, group.lengths())
            for each in group.sessions:
                each.has_mask = True
        draws = LateDraws(drawing, masks, keeps=self._keeps)
        if draws.pending:
            self._fill(draws.pending, masks)
        late_ones = draws.late()
        if draft_rows := draws.draft_rows:
            assert self._deadline is not None, "launch comes before late"
            self._draft_filler.fill(draft_rows, self.budget, self._deadline)
            late_ones += draws.late_drafts()
        sitting_rows = []
        for late_one in late_ones:
            request, row = draws.drop(*late_one)
            self.sitting.append(request)
            sitting_rows.append(row)
            self._held.wait_for_late(request)
        rows = np.array([row for _, row, _ in drawing], np.int32)
        if len(masks.bits) == len(drawing):
            late = self._late(masks, rows, draws.sources, draws.lengths)
        else:
            numbers = [num for _, _, num in drawing]
            offsets = np.concatenate([np.arange(num, dtype=np.int32) for num in numbers])
            late = replace(self._late(masks, np.repeat(rows, numbers)), offsets=offsets)
        if self.sitting:
            late = replace(late, sit_out=sit_out(sitting_rows, self.sitting))
        return self.processors.add_to(late, self.budget, self.sitting) if self._has_edits else late

    def _late(
        self, masks: StepMasks, rows: Ints, sources: Sequence[Session | None] = (), lengths: Sequence[int] = ()
    ) -> DrawEdits:
        if self._pool is not None:
            self._pool.send(masks if self._keeps else None)
        if not self._keeps:
            return DrawEdits(rows, masks.bits, sources=sources or None, lengths=lengths)
        return DrawEdits(
            rows, masks.bits, sources=sources, lengths=lengths, entries=masks.entries, targets=masks.targets
        )

    def _fill(self, pending: Sequence[tuple[Session, int]], masks: StepMasks) -> None:
        """Fill the masks with these indices. A session whose mask takes longer than the budget becomes slow."""
        bits = masks.bits.view(np.uint32)
        if self._pool is not None:
            batch = MaskBatch()
            for session, index in pending:
                batch.add(session, -1, index)
            self._pool.start(batch, masks, keeps=self._keeps)
            self._pool.wait(bits, self.budget, self._time_left())
            return
        before = time.perf_counter()
        for session, index in pending:
            session.fill(bits[index])
            now = time.perf_counter()
            session.is_slow = now - before > self.budget
            before = now

    def close(self) -> None:
        self._draft_filler.close()
        if self._pool is not None:
            self._pool.close()
        self.grammars.close()
        self.processors.close()


# HeldRequests: requests that plans leave out until a background thread has filled their mask.


class HeldRequests:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._num_words = mask_words(grammars.vocab_size)
        self._requests: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def wait_for_late(self, request: Request) -> None:
        """The mask of this request is late: leave it out of plans until it is filled."""
        if request.status is Status.RUNNING:
            request.hold()
            if request not in self._requests:
                self._requests.append(request)

    def fill(self, request: Request, session: Session, budget: float) -> None:
        """Fill the mask of a slow session in the background. `budget`: seconds that masks may take."""
        mask = np.zeros(self._num_words, np.uint32)

        def fill() -> None:
            start = time.perf_counter()
            session.fill(mask)
            session.ready = mask
            session.is_slow = time.perf_counter() - start > budget / 2

        session.job = self._grammars.run(fill)
        self._requests.append(request)

    def wake(self) -> list[Request]:
        """The requests whose masks are filled now."""
        woken = []
        for request in self._requests[:]:
            session = request.session
            assert session is not None
            if session.is_busy and request.status is Status.RUNNING:
                continue
            self._requests.remove(request)
            if request.status is not Status.FINISHED and not session.is_busy:
                woken.append(request)
        return woken


def sit_out(rows: list[int], requests: Sequence[Request]) -> SitOut:
    """The rows of these requests, and the state in which the device computes their last position again."""
    return SitOut(
        np.array(rows, np.int32),
        np.array([len(request.tokens) - 1 for request in requests], np.int32),
        np.array([request.tokens[-1] for request in requests], np.int32),
    )


# WaitingGrammars: requests that wait until their grammar is compiled in the background.


class WaitingGrammars:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[str, tuple[Sequence[Request], Compilation]] = {}  # by request id, all samples

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def compile(self, requests: Sequence[Request]) -> CompiledGrammar | None:
        """The grammar of these samples; None: they wait for it. Raises if it is known to be wrong."""
        leader = requests[0]
        spec = leader.params.structured_outputs
        assert spec is not None
        compilation = self._grammars.compile(spec, leader.caller)
        if compilation.done():
            return compilation.result()
        self._waiting[leader.id] = requests, compilation
        return None

    def leave(self, request: Request) -> None:
        """A sample has ended. After the last one its request waits no more."""
        if (waiting := self._waiting.get(request.id)) is not None and not _live(waiting[0]):
            del self._waiting[request.id]
            self._grammars.leave(waiting[1], request.caller)

    def take(self) -> Iterator[tuple[list[Request], CompiledGrammar | Exception]]:
        """Samples whose grammar is compiled, or is wrong."""
        for name, (requests, compilation) in list(self._waiting.items()):
            if compilation.done():
                del self._waiting[name]
                error = compilation.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield _live(requests), compilation.result() if error is None else error


def _live(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if request.status is not Status.FINISHED]
