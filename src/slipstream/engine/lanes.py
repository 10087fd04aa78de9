"""Lanes: several models in one loop, on one device.

Each lane has a core of its own. The device runs steps in the order of their launches, so the lane that is stepped next
gets the device: always the one with the least device time divided by its weight. Generation weighs more than pooling.
Idle lanes earn no credit: a lane that becomes active starts at the current minimum. So no lane starves, and a lane that
is alone gets the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from slipstream.base.errors import EngineDead, ModelNotFound, UserError
from slipstream.contracts.messages import Abort, Output, Submit
from slipstream.engine.core import EngineCore
from slipstream.engine.sleeping import Sleeper, SleepingDevice
from slipstream.scheduler.encoder_scheduler import EncoderScheduler
from slipstream.scheduler.scheduler import Scheduler

GENERATING, POOLING = 2.0, 1.0
"""Weights of lanes."""


class Lanes:
    """Has the interface of a core. With one lane every step is a step of that core."""

    def __init__(self, cores: Mapping[str, EngineCore], device: SleepingDevice | None = None) -> None:
        """`device`: if the engine has sleep mode."""
        assert cores, "an engine has at least one model"
        self.cores = dict(cores)
        self._lanes = {name: _Lane(name, core) for name, core in self.cores.items()}
        self._default = next(iter(self._lanes.values()))
        for core in self.cores.values():
            core.timer.timeline = self._default.core.timer.timeline  # they share a device
        self.sleeper = Sleeper(self.cores, device)
        self._failure: tuple[str, BaseException] | None = None  # of any lane: all fail together
        # torch's state that steps need: for the calls of a thread, and for a thread that does nothing else
        self.thread_state: Callable[[], AbstractContextManager[None]] = nullcontext
        self.enter_thread: Callable[[], None] = lambda: None

    @property
    def num_steps(self) -> int:
        return sum(core.num_steps for core in self.cores.values())

    def submit(self, *messages: Submit) -> None:
        """Submit prompts for one model: all of them, or none."""
        self._check_alive()
        lane = self._find(messages[0].model)
        self.sleeper.check_awake(lane.name)
        others = [other.core.scheduler for other in self._lanes.values() if other is not lane]
        for name in (message.request_id for message in messages):
            if any(other.serves(name) for other in others):
                raise UserError(f"a request {name!r} is being served already; give each its own id")
        lane.core.submit(*messages)

    def abort(self, message: Abort) -> int:
        """Returns how many samples this ended. Lanes without the request ignore it."""
        return sum(core.abort(message) for core in self.cores.values())

    def reset_prefix_cache(self) -> None:
        """Clears the prefix caches of all models; encoders have none. Between two steps only."""
        for core in self.cores.values():
            if (cache := getattr(core.scheduler, "cache", None)) is not None:
                cache.reset()

    def keeps_query(self, request_id: str) -> bool:
        return any(core.scheduler.keeps_query(request_id) for core in self.cores.values())

    def has_requests(self) -> bool:
        """Whether a step can run; False while the engine is asleep, or only models without weights have requests."""
        return any(self.sleeper.can_run(lane.name) and lane.core.has_requests() for lane in self._lanes.values())

    @property
    def can_run(self) -> bool:
        """Whether the engine is awake and some model has its weights."""
        return any(map(self.sleeper.can_run, self._lanes))

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when `has_requests` may have become true without a message: those of
        other processes that share a model."""
        return [file for core in self.cores.values() if core.peers is not None for file in core.peers.files]

    def step(self) -> list[Output]:
        """One step of the lane that is next."""
        self._check_alive()
        lane = self._next()
        if lane is None:
            return []
        self.sleeper.check_awake(lane.name)
        scheduler = lane.core.scheduler
        if isinstance(scheduler, EncoderScheduler):
            readers_wait = any(other.worked and not other.is_encoder for other in self._lanes.values())
            scheduler.max_num_tokens = lane.core.pace.max_num_tokens() if readers_wait else None
        try:
            return lane.step()
        except BaseException as error:
            self._failure = lane.name, error
            raise

    def is_calling(self) -> bool:
        """Whether a logits processor of a request runs in this thread."""
        constraints = [core.constraints for core in self.cores.values()]
        return any(each.processors.is_calling() for each in constraints if each is not None)

    def take_begun(self) -> list[str]:
        """Generation requests that the last step admitted for the first time."""
        schedulers = [core.scheduler for core in self.cores.values()]
        return [name for each in schedulers if isinstance(each, Scheduler) for name in each.take_begun()]

    def check(self) -> None:
        """Assert every invariant of every lane. For tests and at the end of a process."""
        for core in self.cores.values():
            core.scheduler.check()

    def close(self) -> None:
        for core in self.cores.values():
            core.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            name, error = self._failure
            raise EngineDead(f"{name} has failed: {str(error) or type(error).__name__}") from error

    def _find(self, model: str) -> _Lane:
        if not model:
            return self._default
        if model not in self._lanes:
            raise ModelNotFound(f"there is no model {model!r} here; there is {', '.join(self._lanes)}")
        return self._lanes[model]

    def _next(self) -> _Lane | None:
        if len(self._lanes) == 1:
            return self._default
        waiting = [lane for lane in self._lanes.values() if lane.core.has_requests()]
        busy = [lane for lane in waiting if self.sleeper.can_run(lane.name)]
        if not busy:  # a lane that cannot run, if there is one: its step says why
            return next(iter(waiting), None)
        # lanes that were idle start at the minimum of those that kept working
        front = min((lane.used for lane in busy if lane.worked), default=max(lane.used for lane in busy))
        for lane in self._lanes.values():
            is_busy = lane in busy
            if is_busy and not lane.worked:
                lane.used = max(lane.used, front)
            lane.worked = is_busy
        return min(busy, key=lambda lane: lane.used)


class _Lane:
    def __init__(self, name: str, core: EngineCore) -> None:
        self.name = name
        self.core = core
        self.is_encoder = core.config.scheduler.is_encoder
        self.weight = POOLING if self.is_encoder else GENERATING
        self.used = 0.0  # device seconds divided by the weight
        self.worked = False  # whether it had requests at the last step

    def step(self) -> list[Output]:
        busy, num_launched = self.core.timer.total.busy, self.core.num_steps
        outputs = self.core.step()
        used = self.core.timer.total.busy - busy
        # a device without a clock: every step counts the same
        if not self.core.timer.total.busy and self.core.num_steps > num_launched:
            used = 1e-3
        self.used += used / self.weight
        return outputs
