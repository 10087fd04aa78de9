"""Intake: the prompts of one call on their way into a core, and when each of them is taken in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slipstream.engine.core import EngineCore
from slipstream.errors import UserError
from slipstream.frontend.inputs import Prepared

A_FEW = 8  # prompts taken in with each step, so that many rows that end together find others ready


class PromptFeeder:
    """Between steps the call takes prompts in by `take_some`. With `late` a step may ask for more by `refill`."""

    def __init__(
        self, core: EngineCore, submits: Iterable[Prepared], submit: Callable[[Sequence[Prepared]], int], *, late: bool
    ) -> None:
        """`submit` takes some in, in their order, and says how many: fewer than all where the core's queue is full."""
        self.ended = False  # no more will come
        self.refused: BaseException | None = None  # why; it is raised between steps
        self._core = core
        self._submit = submit
        self._late = late
        self._waiting = iter(submits)
        self._held: list[Prepared] = []  # the first that wait, those that were seen
        self._is_ready = getattr(submits, "is_ready", lambda: True)  # whether looking at it means no waiting

    def take_some(self) -> None:
        """As many as should be there when the next step is planned; all of them, without `late`."""
        num_new = 0
        while taken := self._take(self._room(num_new)):
            num_new += taken

    def refill(self, most: int) -> int:
        """A step asks for up to so many, and hears how many came. If that cannot be, its call is told afterwards."""
        self._core.account.leave(has_work=True)  # to wait for a text is not the core's time
        try:
            return self._take(most)
        except BaseException as error:
            # whatever kept a prompt from being read has touched nothing of the engine
            if error is not self.refused and not isinstance(error, UserError):
                raise
            self.ended, self.refused = True, error
            return 0
        finally:
            self._core.account.enter()

    def _room(self, num_new: int) -> int:
        """How many may be taken in before this is asked again; `num_new` were since the last step."""
        core, scheduler = self._core, self._core.scheduler
        if not self._late:
            return scheduler.config.max_waiting
        if not self._is_ready():
            return not core.has_work()  # there is nothing to do but wait
        if not core.in_flight:
            return not scheduler.num_waiting  # the device waits
        if scheduler.num_waiting >= 2 * scheduler.config.max_num_seqs:
            return 0  # the next steps have enough
        return A_FEW - num_new if num_new < A_FEW else core.runs_far_ahead()

    def _take(self, most: int) -> int:
        """Take the next ones in, and say how many there were."""
        held, waiting, is_ready = self._held, self._waiting, self._is_ready
        while len(held) < most and (not held or is_ready()):
            try:
                held.append(next(waiting))
            except StopIteration:
                num = self._hand_in(most)
                self.ended = not held
                return num
            except BaseException as error:
                self.refused = error
                self._hand_in(most)  # those before it
                raise
        return self._hand_in(most)

    def _hand_in(self, most: int) -> int:
        if not self._held:
            return 0
        num = self._submit(self._held[:most])
        del self._held[:num]
        return num
