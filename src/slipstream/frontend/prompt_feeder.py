"""PromptFeeder: submits the prompts of one call to the core, and decides when each is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slipstream.base.errors import UserError
from slipstream.engine.core import EngineCore
from slipstream.frontend.inputs import PreparedPrompt

PROMPTS_PER_STEP = 8  # prompts submitted with each step, so that rows that finish together can be filled at once


class PromptFeeder:
    """Between steps the call submits prompts by `take_some`. With `late` the scheduler can request more by `refill`."""

    def __init__(
        self,
        core: EngineCore,
        submits: Iterable[PreparedPrompt],
        submit: Callable[[Sequence[PreparedPrompt]], int],
        *,
        late: bool,
    ) -> None:
        """`submit` submits prompts in order and returns how many: fewer than all where the core's queue is full."""
        self.ended = False  # no prompts are left
        self.error: BaseException | None = None  # the error that ended them, which the call raises between steps
        self._core = core
        self._submit = submit
        self._late = late
        self._source = iter(submits)
        self._held: list[PreparedPrompt] = []  # taken from the source and not yet submitted
        self._is_ready = getattr(submits, "is_ready", lambda: True)  # whether `next(source)` does not wait

    def take_some(self) -> None:
        """Submits the prompts that the next step should have; all of them, without `late`."""
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
        if not self._late:
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
        held, source, is_ready = self._held, self._source, self._is_ready
        while len(held) < limit and (not held or is_ready()):
            try:
                held.append(next(source))
            except StopIteration:
                num = self._submit_held(limit)
                self.ended = not held
                return num
            except BaseException as error:
                self.error = error
                self._submit_held(limit)  # those before it
                raise
        return self._submit_held(limit)

    def _submit_held(self, limit: int) -> int:
        if not self._held:
            return 0
        num = self._submit(self._held[:limit])
        del self._held[:num]
        return num
