"""Lanes: several models in one loop, on one device.

Each lane has a core of its own. The device runs steps in the order of their launches, so the lane that is stepped next
gets the device: always the one with the least device time divided by its weight. Generation weighs more than pooling.
Idle lanes earn no credit: a lane that becomes active starts at the current minimum. So no lane starves, and a lane that
is alone gets the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from slipstream.base.errors import EngineAsleep, EngineDead, InvalidOption, InvalidParams, ModelNotFound, UserError
from slipstream.contracts.messages import Abort, Output, PromptSource, Submit
from slipstream.contracts.step import WeightUpdate
from slipstream.engine.core import EngineCore
from slipstream.metrics.stats import LaneStats

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

    def feed(self, source: PromptSource, model: str = "") -> Callable[[], None]:
        """Takes the prompts of a call for one model as steps have room for them. Returns a function that ends it."""
        self._check_alive()
        lane = self._find(model)
        self.sleeper.check_awake(lane.name)
        return lane.core.feed(source)

    def abort(self, message: Abort) -> int:
        """Returns how many samples this ended. Lanes without the request ignore it."""
        return sum(core.abort(message) for core in self.cores.values())

    def reset_prefix_cache(self) -> None:
        """Clears the prefix caches of all models; encoders have none. Between two steps only."""
        for core in self.cores.values():
            if core.scheduler.cache is not None:
                core.scheduler.cache.reset()

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
        if len(self._lanes) > 1:
            lane.core.readers_wait = any(other.worked and not other.is_encoder for other in self._lanes.values())
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
        return [name for core in self.cores.values() for name in core.scheduler.take_begun()]

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


# Sleeper: releases the device memory of weights and caches while an engine is not used, and exchanges weights.
#
# Both happen between two steps. Requests that have not finished are preempted: they are computed again afterwards, with
# the weights of then. The prefix cache is reset, because its pages are lost or belong to other weights.

WEIGHTS, CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
TAGS = (WEIGHTS, CACHE, SCHEDULING)
"""What `wake_up` can bring back, by vLLM's names."""


class SleepingDevice(Protocol):
    """The part of `Device` that is used here."""

    def release(self, tag: str, *, keep: bool) -> None: ...
    def map(self, tag: str) -> None: ...


class Sleeper:
    def __init__(self, cores: Mapping[str, EngineCore], device: SleepingDevice | None = None) -> None:
        """`device`: None if the engine has no sleep mode."""
        self._cores = cores
        self._device = device
        self._asleep: set[str] = set()  # tags
        self._missing: dict[str, int] = {}  # by model: tensors that were dropped, or changed by an update that failed

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def can_run(self, model: str) -> bool:
        """Whether the engine is awake and the model has its weights."""
        return not self._asleep and model not in self._missing

    def check_awake(self, model: str) -> None:
        """Raises where requests for the model cannot run."""
        if self._asleep:
            raise EngineAsleep(f"the engine is asleep ({', '.join(sorted(self._asleep))}); call wake_up first")
        if model in self._missing:
            raise EngineAsleep(
                f"weights of {model} were dropped (sleep level 2) or replaced in part (an update that failed), and "
                f"{self._missing[model]} tensors were not loaded again; call update_weights first"
            )

    def sleep(self, level: int) -> list[Output]:
        """Level 0: no step runs. Level 1: weights move to host memory, caches are dropped. Level 2: weights are dropped
        too. Returns the outputs of steps that were in flight."""
        if type(level) is not int or level not in (0, 1, 2):
            raise InvalidParams(f"level is {level!r:.50}; give 0, 1 or 2", param="level")
        if level == 0:
            self._asleep.add(SCHEDULING)
            return [output for core in self._cores.values() for output in core.drain()]
        device = self._sleeping_device()
        if level == 2:
            for core in self._cores.values():
                self._weights_of(core).check_can_update()
        outputs = [output for core in self._cores.values() for output in _pause(core)]
        self._asleep.update(TAGS)
        device.release(WEIGHTS, keep=level == 1)
        device.release(CACHE, keep=False)
        if level == 2:
            for core in self._cores.values():
                self._weights_of(core).drop()
            self._count_missing()
        return outputs

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings back what the tags name; None: everything. Weights that were dropped must be loaded again."""
        if tags is not None and (isinstance(tags, str) or not all(tag in TAGS for tag in tags)):
            raise InvalidParams(f"tags are {tags!r:.100}; give a list of {', '.join(TAGS)}", param="tags")
        wanted = set(TAGS if tags is None else tags)
        for tag in (WEIGHTS, CACHE):
            if tag in wanted & self._asleep:
                self._sleeping_device().map(tag)
        self._asleep -= wanted
        if self._asleep == {SCHEDULING} and wanted & {WEIGHTS, CACHE}:
            self._asleep.clear()

    def update_weights(self, source: object = None, model: str | None = None) -> list[Output]:
        """Replaces weights of a model in place, see `WeightUpdate`. Returns the outputs of steps that were in
        flight."""
        if WEIGHTS in self._asleep:
            raise EngineAsleep('the weights are asleep; call wake_up(tags=["weights"]) first')
        if model is not None and model not in self._cores:
            raise ModelNotFound(f"there is no model {model!r:.100} here; there is {', '.join(self._cores)}")
        core = next(iter(self._cores.values())) if model is None else self._cores[model]
        weights = self._weights_of(core)
        weights.check_can_update()
        outputs = [] if self._asleep - {SCHEDULING} else _pause(core)
        if core.recorder is not None:
            core.recorder.weights_changed(from_files=source is None)
        try:
            weights.update(source)
        finally:
            self._count_missing()
        return outputs

    def preempt_all(self) -> list[Output]:
        """Releases the pages of all running requests, which are computed again from their tokens, and resets the prefix
        caches."""
        return [output for core in self._cores.values() for output in _pause(core)]

    def _count_missing(self) -> None:
        counts = {name: self._weights_of(core).num_missing for name, core in self._cores.items()}
        self._missing = {name: count for name, count in counts.items() if count}

    def _sleeping_device(self) -> SleepingDevice:
        if self._device is None:
            raise InvalidOption("enable_sleep_mode is off, so that memory cannot be released; start the engine with it")
        return self._device

    def _weights_of(self, core: EngineCore) -> WeightUpdate:
        if core.handoff is not None:
            raise InvalidOption("weights of engines that exchange pages stay as they are; start them again instead")
        if core.weights is None:
            raise InvalidOption("weights of several ranks cannot be exchanged; set tensor_parallel_size to 1")
        return core.weights


def _pause(core: EngineCore) -> list[Output]:
    """Complete the steps in flight, preempt all running requests and reset the prefix cache."""
    outputs = core.drain()
    core.scheduler.preempt_all()
    if core.scheduler.cache is not None:
        core.scheduler.cache.reset()
    return outputs


# The statistics of a core, for metrics.


def lane_stats(name: str, core: EngineCore) -> LaneStats:
    scheduler, time = core.scheduler, core.timer.total
    cache = scheduler.cache
    tier = None if cache is None else cache.tier
    drafts = None if scheduler.drafts is None else scheduler.drafts.counts
    pool = cache.groups[0].pool if cache is not None and cache.groups else None
    adapters = scheduler.adapters
    running, waiting = ((), ()) if adapters is None else adapters.names()
    return LaneStats(
        name,
        num_steps=core.num_steps,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_preemptions=scheduler.num_preemptions,
        num_free_pages=0 if pool is None else pool.num_free,
        num_pages=0 if pool is None else pool.num_usable,
        page_size=0 if cache is None else cache.page_size,
        prefix_queries=0 if cache is None else cache.num_queries,
        prefix_hits=0 if cache is None else cache.num_hits,
        tier_hits=0 if tier is None else tier.num_hits,
        tier_bytes_stored=0 if tier is None else tier.bytes_stored,
        tier_bytes_loaded=0 if tier is None else tier.bytes_loaded,
        busy=time.busy,
        turnaround=time.turnaround,
        host_late=time.host_late,
        output=time.output,
        grammar=time.grammar,
        no_requests=time.no_requests,
        host=time.host,
        num_drafted_rows=0 if drafts is None else drafts.num_rows,
        num_drafts=0 if drafts is None else drafts.num_drafts,
        num_accepted_drafts=0 if drafts is None else drafts.num_accepted,
        accepted_at=() if drafts is None else tuple(drafts.accepted_at),
        memory=core.memory,
        max_loras=0 if adapters is None else adapters.config.max_loras,
        running_adapters=running,
        waiting_adapters=waiting,
    )
